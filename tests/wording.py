"""How a fact must read, and what its kind and its row of JSON must be, whichever program it is of."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any, get_args, get_origin

from protomodels_cli.facts import Fact
from protomodels_cli.observe.notices import Notice, as_row


def members(union: Any) -> set[type]:
    """Of a union, also one that is annotated or made of others."""
    if get_args(union) and not isinstance(union, type):
        parts = (
            get_args(union)[:1] if get_origin(union) is not None and hasattr(union, "__metadata__") else get_args(union)
        )
        return set().union(*(members(part) for part in parts))
    return {union}


def facts_of(*modules: ModuleType) -> list[type[Fact]]:
    found = {x for module in modules for x in vars(module).values() if isinstance(x, type) and issubclass(x, Fact)}
    own = {module.__name__ for module in modules}
    return sorted(
        (x for x in found if dataclasses.is_dataclass(x) and x.__module__ in own), key=lambda fact: fact.__name__
    )


def check_kinds(facts: Iterable[type[Fact]]) -> None:
    kinds = [fact.__dataclass_fields__["kind"].default for fact in facts]  # type: ignore[attr-defined]
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", kind) for kind in kinds)
    assert len(set(kinds)) == len(kinds)


def check_wording(text: str) -> None:
    """A sentence stands on its own."""
    assert not re.match(r"(it|its|they|their|he|she|this|that) (?!peer|machine|pmtrain)", text, re.IGNORECASE), (
        "a pronoun without its noun"
    )
    assert not re.search(r"\b(its|they|their|anew)\b", text), "name what is meant"
    assert not text.endswith("."), "sentences are joined to others"
    assert not re.search(r"\d\.\d{5,}|\de[+-]\d", text), "no raw floats"
    assert text == text.strip()
    assert "  " not in text
    assert "None" not in text


def check_row(notice: Notice) -> None:
    row = as_row(notice)
    assert next(iter(row)) == "kind"
    assert row["kind"] == notice.kind
    assert set(row) == {f.name for f in dataclasses.fields(notice)}  # type: ignore[arg-type]
    back = json.loads(json.dumps(row))
    for name in row:
        if isinstance(inner := getattr(notice, name), Fact):
            assert back[name]["kind"] == inner.kind, "a reason keeps its kind"
