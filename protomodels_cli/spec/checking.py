"""How rules that tie fields together are written, and how what contradicts them is found, before anything starts.

Each check is a pure function of the spec that yields problems of the kind that is the function's name. Its `fields` are
the ones that it looks at: it is skipped only where one of *these* is malformed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from protomodels_cli.spec.errors import Problem
from protomodels_cli.spec.schema import RunSpec

Found = Iterator[tuple[str, str, str]]  # field to point at, rule, fix
Find = Callable[[RunSpec], Found]


@dataclass(frozen=True)
class Check:
    fields: tuple[str, ...]
    find: Find


class Checks(list[Check]):
    """Those of one file; calling it with the fields of a check adds the function below."""

    def __call__(self, *fields: str) -> Callable[[Find], Find]:
        def register(find: Find) -> Find:
            self.append(Check(fields, find))
            return find

        return register


def contradictions(spec: RunSpec, malformed: set[str], checks: Iterable[Check]) -> list[Problem]:
    """All contradictions that do not involve a field which is malformed by itself."""

    def usable(field: str) -> bool:
        return not any(field == bad or field.startswith(bad + ".") or bad.startswith(field + ".") for bad in malformed)

    return [
        Problem(field, rule, fix, value_at(spec, field), kind=c.find.__name__)
        for c in checks
        if all(map(usable, c.fields))
        for field, rule, fix in c.find(spec)
    ]


def value_at(spec: RunSpec, field: str) -> object:
    value: object = spec
    for part in field.split("."):
        value = getattr(value, part)
    return value
