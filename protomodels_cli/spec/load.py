"""From a YAML file to a resolved RunSpec, or to every problem in it at once."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from protomodels_cli.spec import yaml_tree
from protomodels_cli.spec.checks import contradictions
from protomodels_cli.spec.errors import Problem, SpecError
from protomodels_cli.spec.refused import REFUSED, REPLACED
from protomodels_cli.spec.schema import RunSpec, Section

Loc = tuple[str | int, ...]


def load_spec(path: str | Path) -> RunSpec:
    """The resolved spec in a file. Raises SpecError with all problems."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "it is not UTF-8 text"
        raise SpecError(
            [Problem("", f"must be a readable file: {reason}", "check the path", None, str(path), 0)]
        ) from None
    return parse_spec(text, str(path), path.parent)


def parse_spec(text: str, file: str = "spec", base: Path = Path()) -> RunSpec:
    data, lines, twice = yaml_tree.read_tree(text, file)
    return _validate(data, lines, twice, file, base)


def spec_from(data: dict[str, Any]) -> RunSpec:
    """A spec from plain data, for programs that make their own."""
    return _validate(data, {}, [], "spec", Path())


def _validate(data: Any, lines: dict[Loc, int], twice: list[Problem], file: str, base: Path) -> RunSpec:
    def located(p: Problem, loc: Loc) -> Problem:
        while loc and loc not in lines:
            loc = loc[:-1]
        return Problem(p.field, p.rule, p.fix, p.value, file, lines.get(loc, 0))

    if not isinstance(data, dict):
        raise SpecError(
            [
                Problem(
                    "",
                    "must be a mapping of fields to values",
                    "start with `steps:` and `model:`",
                    data,
                    file,
                    1,
                )
            ]
        )
    problems = list(twice)
    malformed: set[str] = set()
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as error:
        for e in error.errors():
            loc = e["loc"]
            problems.append(located(_field_problem(e, loc), loc))
            if e["type"] != "extra_forbidden":  # an unknown field takes nothing away from the known ones
                malformed.add(".".join(map(str, loc)))
        spec = _with_stand_ins(data, [e["loc"] for e in error.errors()])
    found = contradictions(spec, malformed)
    if not {"tokenizer", "tokenizer.file", "tokenizer.kind", "tokenizer.vocab_size"} & malformed:
        spec, missing = _with_vocabulary(spec, base)
        found += missing
    problems += [located(p, tuple(p.field.split("."))) for p in found]
    if problems:
        raise SpecError(sorted(problems, key=lambda p: p.line))
    return _resolve(spec)


def _field_problem(e: Any, loc: Loc) -> Problem:
    """One pydantic error in our words."""
    field = ".".join(map(str, loc))
    kind, value, ctx = e["type"], e.get("input"), e.get("ctx", {})
    if kind == "missing":
        return Problem(field, "is required: only you can know it", f"add `{loc[-1]}:`")
    if kind == "extra_forbidden":
        return _unknown_field(field, loc, value)
    if kind in ("literal_error", "word"):
        words = ctx.get("words") or _allowed(loc)
        fix = f"use one of {', '.join(words)}"
        if value in (True, False) or str(value).lower() in ("on", "off", "yes", "no"):
            fix += " (a bare on, off, yes or no is a boolean to YAML: a word is meant here)"
        elif close := difflib.get_close_matches(str(value), words, 1):
            fix = f"did you mean {close[0]!r}? Otherwise " + fix
        return Problem(field, "must be one of the words this field knows", fix, value)
    if kind == "bool_type":
        return Problem(
            field,
            "must be true or false",
            "write true or false (on, off, yes, no are not booleans here)",
            value,
        )
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        word = {
            "greater_than": "above",
            "greater_than_equal": "at least",
            "less_than": "below",
            "less_than_equal": "at most",
        }[kind]
        bound = next(iter(ctx.values()))
        return Problem(field, f"must be {word} {bound}", f"use a number {word} {bound}", value)
    if kind in ("int_type", "int_from_float"):
        return Problem(field, "must be a whole number", "write digits only, without quotes", value)
    if kind in ("float_type", "finite_number"):
        return Problem(field, "must be a finite number", "write it like 0.001 or 1e-3, without quotes", value)
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return Problem(field, "must be a section with fields of its own", "write its fields below it, indented", value)
    if kind == "list_type":
        return Problem(field, "must be a list", "write it as [a, b]", value)
    if kind == "string_type":
        return Problem(field, "must be text", "put it in quotes", value)
    if kind == "string_pattern_mismatch":
        return Problem(
            field,
            "must be letters, digits, dots, dashes and underscores, at most 64",
            "choose a simpler name",
            value,
        )
    return Problem(field, e["msg"], ctx.get("fix", "see docs/spec.md"), value)


def _unknown_field(field: str, loc: Loc, value: Any) -> Problem:
    if field in REFUSED:
        return Problem(field, REFUSED[field], "remove it", value)
    if field in REPLACED:
        why, fix = REPLACED[field]
        return Problem(field, why, fix, value)
    section = _section_at(loc[:-1])
    siblings = list(section.model_fields) if section else []
    if close := difflib.get_close_matches(str(loc[-1]), siblings, 1, cutoff=0.6):
        return Problem(field, "is not a field of the spec", f"did you mean {close[0]!r}?", value)
    elsewhere = [f for f in all_fields() if f.split(".")[-1] == loc[-1]]
    if elsewhere:
        return Problem(field, "is not a field here", f"did you mean {elsewhere[0]!r}?", value)
    where = ".".join(map(str, loc[:-1])) or "the top level"
    return Problem(field, "is not a field of the spec", f"{where} has: {', '.join(siblings)}", value)


def _section_at(loc: Loc) -> type[BaseModel] | None:
    section: type[BaseModel] = RunSpec
    for part in loc:
        info = section.model_fields.get(str(part))
        if info is None or not (isinstance(info.annotation, type) and issubclass(info.annotation, Section)):
            return None
        section = info.annotation
    return section


def _allowed(loc: Loc) -> list[str]:
    section = _section_at(loc[:-1])
    assert section is not None
    return [str(w) for w in getattr(section.model_fields[str(loc[-1])].annotation, "__args__", ())]


def all_fields(section: type[BaseModel] = RunSpec, prefix: str = "") -> list[str]:
    """Dotted names of all fields, sections before their content."""
    names: list[str] = []
    for name, info in section.model_fields.items():
        names.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            names += all_fields(info.annotation, prefix + name + ".")
    return names


# Required fields need some value for the contradiction checks to run beside a missing one; those checks that
# look at a stand-in are skipped, so its value never shows.
_STAND_INS: dict[str, Any] = {"steps": 1, "model": {"layers": 1, "width": 2, "heads": 1}}


def _with_stand_ins(data: dict[str, Any], bad: list[Loc]) -> RunSpec:
    """The spec with every malformed field taken out (its default stands in)."""
    copy = json.loads(json.dumps(data, default=str))
    for loc in bad:
        _take_out(copy, loc)
    for name, stand_in in _STAND_INS.items():
        if isinstance(stand_in, dict):
            copy[name] = {**stand_in, **copy.get(name, {})}
        else:
            copy.setdefault(name, stand_in)
    return RunSpec.model_validate(copy)


def _take_out(data: Any, loc: Loc) -> None:
    for part in loc[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
        if isinstance(data, list):  # one bad entry: the whole list goes
            data.clear()
    if isinstance(data, dict):
        data.pop(loc[-1], None)


def _resolve(spec: RunSpec) -> RunSpec:
    """Fill in the sizes that depend on other fields, so that a saved spec says what ran."""
    m = spec.model
    sizes = {
        "kv_heads": m.kv_heads or m.heads,
        "head_dim": m.head_dim or m.width // m.heads,
        "hidden": m.hidden or -(-8 * m.width // 3 // 32) * 32,
    }
    return spec.model_copy(update={"model": m.model_copy(update=sizes)})


def _with_vocabulary(spec: RunSpec, base: Path) -> tuple[RunSpec, list[Problem]]:
    t, problems = spec.tokenizer, []
    vocab = t.vocab_size or {"bytes": 256, "bpe": 4096}.get(t.kind)
    if vocab is None and t.file is not None:
        vocab, problem = _vocab_of(base / t.file)
        problems = [problem] if problem else []
    return spec.model_copy(update={"tokenizer": t.model_copy(update={"vocab_size": vocab})}), problems


def with_absolute_paths(spec: RunSpec, base: Path) -> RunSpec:
    """The same run, readable from anywhere: for a copy of the spec that is kept elsewhere."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str((base / path).absolute())

    d, t = spec.data, spec.tokenizer
    files = {name: [absolute(f) for f in getattr(d, name)] for name in ("files", "val_files")}
    data = d.model_copy(update={**files, "cache_dir": absolute(d.cache_dir)})
    return spec.model_copy(update={"data": data, "tokenizer": t.model_copy(update={"file": absolute(t.file)})})


def _vocab_of(path: Path) -> tuple[int | None, Problem | None]:
    def problem(rule: str) -> tuple[None, Problem]:
        return None, Problem(
            "tokenizer.file",
            rule,
            "check the path (relative to the spec file), or set tokenizer.vocab_size",
            str(path),
        )

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = list(content["model"]["vocab"].values()) + [t["id"] for t in content.get("added_tokens", [])]
        return max(ids) + 1, None
    except OSError as e:
        return problem(f"must be readable: {e.strerror}")
    except (ValueError, KeyError, AttributeError, TypeError):
        return problem("must be a tokenizer.json of Hugging Face's tokenizers with a vocabulary")
