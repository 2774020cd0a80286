"""From a YAML file to a resolved RunSpec, or to every problem in it at once."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from protomodels_cli.forms import Sizes
from protomodels_cli.spec import checks, data_checks, yaml_tree
from protomodels_cli.spec.checking import contradictions
from protomodels_cli.spec.checkpoint import fill_in
from protomodels_cli.spec.errors import Problem, SpecError
from protomodels_cli.spec.fields import Section
from protomodels_cli.spec.hidden import dense_hidden, matched_hidden, usual_hidden
from protomodels_cli.spec.refused import REFUSED, REPLACED
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.spec.vocabulary import VocabularyError, ids_in

Loc = tuple[str | int, ...]


def load_spec(path: str | Path) -> RunSpec:
    """The resolved spec in a file. Raises SpecError with all problems."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "the text is not UTF-8"
        unreadable = Problem(
            "", f"must be a readable file: {reason}", "check the path", None, str(path), 0, "unreadable"
        )
        raise SpecError([unreadable]) from None
    return parse_spec(text, str(path), path.parent)


def parse_spec(text: str, file: str = "spec", base: Path = Path()) -> RunSpec:
    data, lines, twice = yaml_tree.read_tree(text, file)
    return _validate(data, lines, twice, file, base, resolved=False)


def spec_from(data: dict[str, Any]) -> RunSpec:
    """A spec from plain data, for programs that make their own. One that is resolved needs no checkpoint."""
    return _validate(data, {}, [], "spec", Path(), resolved=True)


def _validate(
    data: Any, lines: dict[Loc, int], twice: list[Problem], file: str, base: Path, *, resolved: bool
) -> RunSpec:
    def located(p: Problem, loc: Loc) -> Problem:
        while loc and loc not in lines:
            loc = loc[:-1]
        return replace(p, file=file, line=lines.get(loc, 0))

    if not isinstance(data, dict):
        rule, fix = "must be a mapping of fields to values", "start with `steps:` and `model:`"
        raise SpecError([Problem("", rule, fix, data, file, 1, "mapping")])
    filled = fill_in(data, base, resolved=resolved)
    data, malformed = filled.data, set(filled.unknown)
    problems = [*twice, *(located(p, tuple(p.field.split("."))) for p in filled.problems)]
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as error:
        for e in error.errors():
            loc = e["loc"]
            problems.append(located(_problem(e, loc), loc))
            if e["type"] != "extra_forbidden":  # an unknown field takes nothing away from the known ones
                malformed.add(".".join(map(str, loc)))
        spec = _with_stand_ins(data, [e["loc"] for e in error.errors()])
    found = contradictions(spec, malformed, [*checks.check, *data_checks.check])
    if not {"tokenizer", "tokenizer.file", "tokenizer.kind", "tokenizer.vocab_size"} & malformed:
        spec, missing = _with_vocabulary(spec, base)
        found += missing
    problems += [located(p, tuple(p.field.split("."))) for p in found]
    if problems:
        raise SpecError(sorted(problems, key=lambda p: p.line))
    return _resolve(spec)


def _problem(e: Any, loc: Loc) -> Problem:
    """One of pydantic's errors as a problem."""
    field, value = ".".join(map(str, loc)), e.get("input")
    kind = "word" if e["type"] == "literal_error" else e["type"]
    if kind == "missing":
        return Problem(field, "is required: there is no default", f"add `{loc[-1]}:`", kind=kind)
    if kind == "extra_forbidden":
        return _unknown_field(field, loc, value)
    rule, fix = _rule_and_fix(kind, loc, value, e)
    return Problem(field, rule, fix, value, kind=kind)


def _rule_and_fix(kind: str, loc: Loc, value: Any, e: Any) -> tuple[str, str]:
    ctx = e.get("ctx", {})
    if kind == "word":
        words = ctx.get("words") or _allowed(loc)
        number = re.findall(r"\d+", str(value))  # another number is no slip: bfloat16 is not meant to be float64
        close = difflib.get_close_matches(str(value), [w for w in words if re.findall(r"\d+", w) == number], 1)
        fix = f"did you mean {close[0]!r}?" if close else "write one of these words"
        return f"must be one of {', '.join(words)}", fix
    if kind == "bool_type":
        return "must be true or false", "write true or false; on, off, yes and no are not booleans here"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        [(bound, number)] = ctx.items()
        word = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}[bound]
        limit = f"{word} {number:g}" if isinstance(number, float) else f"{word} {number}"
        return f"must be {limit}", f"use a number {limit}"
    if kind in ("int_type", "int_from_float"):
        return "must be a whole number", "write digits only, without quotes"
    if kind in ("float_type", "finite_number"):
        return "must be a finite number", "write a number like 0.001 or 1e-3, without quotes"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return "must be a section with fields of its own", f"write the fields below `{loc[-1]}:`, indented"
    if kind == "list_type":
        return "must be a list", "write the values as [a, b]"
    if kind == "string_type":
        return "must be text", "put the value in quotes"
    if kind == "string_pattern_mismatch":
        rule = "must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter or digit"
        return rule, "choose a simpler name"
    return e["msg"], ctx.get("fix", "see docs/spec.md")


def _unknown_field(field: str, loc: Loc, value: Any) -> Problem:
    if field in REFUSED:
        return Problem(field, REFUSED[field], f"remove `{loc[-1]}`", value, kind="refused")
    if field in REPLACED:
        why, fix = REPLACED[field]
        return Problem(field, why, fix, value, kind="replaced")
    section = _section_at(loc[:-1])
    siblings = list(section.model_fields) if section else []
    if close := difflib.get_close_matches(str(loc[-1]), siblings, 1, cutoff=0.6):
        return Problem(field, "is not a field of the spec", f"did you mean {close[0]!r}?", value, kind="unknown")
    elsewhere = [f for f in all_fields() if f.split(".")[-1] == loc[-1]]
    if elsewhere:
        return Problem(
            field, "is not a field of this section", f"did you mean {elsewhere[0]!r}?", value, kind="unknown"
        )
    where = ".".join(map(str, loc[:-1])) or "the top level"
    fix = f"remove `{loc[-1]}`, or use a field of {where}: {', '.join(siblings)}"
    return Problem(field, "is not a field of the spec", fix, value, kind="unknown")


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


# Where a required field is missing, a stand-in lets the checks of the other fields run. Checks that look at the
# stand-in itself are skipped, so its value never shows.
_STAND_INS: dict[str, Any] = {"steps": 1, "model": {"layers": 1, "width": 2, "heads": 1}}


def _with_stand_ins(data: dict[str, Any], bad: list[Loc]) -> RunSpec:
    """The spec without its malformed fields: each has its default instead."""
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
    m, dense = spec.model, dense_hidden(spec)
    sizes: dict[str, Any] = {
        "kv_heads": m.kv_heads or m.heads,
        "head_dim": m.head_dim or m.width // m.heads,
        "hidden": m.hidden or usual_hidden(m.width),
    }
    if dense is not None:
        sizes |= {"hidden": matched_hidden(spec, dense), "dense_hidden": dense}
    if spec.has_segments:
        sizes["segments"] = spec.layers_per_segment
    form_sizes = Sizes.of(spec)
    free = spec.form.free_layers(form_sizes) if spec.form.has_basis else form_sizes.unconstrained_layers
    subspace = {
        "unconstrained_layers": free,
        "anchor_tokens": spec.anchor_tokens,
        "early_loss": spec.early_loss,
    }
    return spec.model_copy(
        update={"model": m.model_copy(update=sizes), "subspace": spec.subspace.model_copy(update=subspace)}
    )


def _with_vocabulary(spec: RunSpec, base: Path) -> tuple[RunSpec, list[Problem]]:
    t, problems = spec.tokenizer, []
    vocab = t.vocab_size or {"bytes": 256, "bpe": 4096}.get(t.kind)
    if vocab is None and t.file is not None:
        try:
            vocab = ids_in(base / t.file)
        except VocabularyError as e:
            fix = "check the path (relative to the spec file), or set tokenizer.vocab_size"
            problems = [Problem("tokenizer.file", str(e), fix, str(base / t.file), kind="tokenizer_file")]
    return spec.model_copy(update={"tokenizer": t.model_copy(update={"vocab_size": vocab})}), problems


def with_absolute_paths(spec: RunSpec, base: Path) -> RunSpec:
    """The same run with paths that hold from any folder: for a copy of the spec that is kept elsewhere."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str((base / path).absolute())

    d, t, s, m = spec.data, spec.tokenizer, spec.snapshots, spec.model
    files = {name: [absolute(f) for f in getattr(d, name)] for name in ("files", "val_files")}
    on_the_hub = d.dataset is None or not (base / d.dataset).is_dir()
    dataset = d.dataset if on_the_hub else absolute(d.dataset)
    data = d.model_copy(update={**files, "dataset": dataset, "cache_dir": absolute(d.cache_dir)})
    tokenizer = t.model_copy(update={"file": absolute(t.file)})
    copy_to = s.copy_to if "://" in (s.copy_to or "") else absolute(s.copy_to)
    snapshots = s.model_copy(update={"copy_to": copy_to})
    model = m.model_copy(update={"init": absolute(m.init)})
    return spec.model_copy(update={"model": model, "data": data, "tokenizer": tokenizer, "snapshots": snapshots})


def for_peers(spec: RunSpec, base: Path) -> RunSpec:
    """What peers are told of a run: all that they compute with, and no path, bucket or address of the owner's."""
    d, t, s, m = spec.data, spec.tokenizer, spec.snapshots, spec.model
    files = {name: [f"{name}-{i}" for i, _ in enumerate(getattr(d, name))] for name in ("files", "val_files")}
    on_the_hub = d.dataset is None or not (base / d.dataset).is_dir()
    data = d.model_copy(update={**files, "dataset": d.dataset if on_the_hub else "dataset", "cache_dir": None})
    tokenizer = t.model_copy(update={"file": t.file and "tokenizer.json"})
    scheme, _, rest = (s.copy_to or "").rpartition("://")
    snapshots = s.model_copy(update={"copy_to": (f"{scheme}://store" if scheme else "store") if rest else None})
    model = m.model_copy(update={"init": m.init and "checkpoint"})
    return spec.model_copy(update={"model": model, "data": data, "tokenizer": tokenizer, "snapshots": snapshots})
