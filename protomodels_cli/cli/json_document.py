"""docs/json.md from json_formats.py: every field that `--format json` prints.   scripts/docs.sh

What a field means is said once, where it is declared: in the model, in the dataclass, or in the protocol's message.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protomodels_cli.cli import outlook
from protomodels_cli.cli.json_formats import PRINTED, Chosen, CostForecast, ModelSize, Printed
from protomodels_cli.cli.output import FORMAT
from protomodels_cli.cost import audits, daily, forecast
from protomodels_cli.doctor import facts as doctor_facts
from protomodels_cli.doctor.findings import Finding

PROTO = Path(__file__).parents[2] / "proto" / "protomodels_cli" / "wire" / "pb" / "pmtrain.proto"
HEAD = f"""\
# What `--format json` prints

Every command that only reads speaks to programs with `--format json`, and so does `init`: on standard output one
object, or one object a line where there are many (`events`, `logs`, `top`). Errors are for people, on standard error;
programs read the exit code. Each object has `"format": {FORMAT}`: the number rises where a field goes or means
something else. Fields may be added without that, so take no notice of those you do not know.

Enumerated values and `…_kind` are for programs; sentences (`text`, `waiting_for`, `reason`, `trouble`) are for people
and may change. Times are in seconds, sizes in bytes. A number that is not finite, which JSON does not have, is a string
(`nan`, `inf`; in a status `NaN`, `Infinity`).

`eval`, `demo`, `reference`, `lab` and `bench` take minutes or hours, and show how far they are. `--output FILE` (or
`--json FILE`, as before) writes what they measured.

This page is made from `protomodels_cli/cli/json_formats.py` by `scripts/docs.sh`; a test holds real output against it.
"""


def document() -> str:
    told, parts = set[str](), [HEAD]
    for command, printed in PRINTED.items():
        parts += _command(command, printed, told)
    return "".join(parts)


def _command(command: str, printed: Printed, told: set[str]) -> Iterator[str]:
    schema = printed.model.model_json_schema()
    name = schema["title"]
    yield f"\n## `pmtrain {command}`\n"
    yield "\nOne object a line" if printed.lines else "\nOne object"
    if name in told:
        yield f", as of {_link(name)}.\n"
        return
    told.add(name)
    yield f":\n\n### {name}\n" if name == "RunStatus" else ":\n"
    yield from _table(name, schema)
    for inner, below in schema.get("$defs", {}).items():
        if inner not in told:
            told.add(inner)
            yield f"\n### {inner}\n"
            yield from _table(inner, below)


def _table(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield "\n| field | type | meaning |\n|---|---|---|\n"
    said, required = _meanings(name), schema.get("required", [])
    for field, facts in schema["properties"].items():
        meaning = facts.get("description") or said.get(field, "")
        absent = "" if field in required else "may be absent"
        words = "; ".join(filter(None, [meaning, absent])).replace("|", "\\|").replace("None:", "null:")
        yield f"| `{field}` | {_type(facts)} | {words} |\n"
    if schema.get("additionalProperties") is True:
        yield "| … | | the fields of its kind |\n"


def _type(facts: dict[str, Any]) -> str:
    if "$ref" in facts:
        return _link(facts["$ref"].rpartition("/")[2])
    if "anyOf" in facts:
        return " or ".join(map(_type, facts["anyOf"]))
    if "enum" in facts:
        return ", ".join(f"`{value}`" for value in facts["enum"] if value)
    if "const" in facts:
        return f"`{str(facts['const']).lower()}`"
    if facts.get("type") == "array":
        if "items" not in facts:  # as many as there are types
            return f"[{', '.join(map(_type, facts['prefixItems']))}]"
        return f"list of {_type(facts['items'])}"
    if facts.get("type") == "object":
        return f"{_type(facts['additionalProperties'])} by name"
    return str(facts.get("type", "any"))


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _meanings(name: str) -> dict[str, str]:
    """What is said of the fields of a dataclass or a message, behind each."""
    sources: dict[str, list[type[Any]]] = {
        "Forecast": [forecast.Estimate, CostForecast],
        "Chosen": [forecast.Estimate, Chosen],
        "ModelSize": [ModelSize],
    }
    sources |= {"Stage": [forecast.Stage], "Bottleneck": [forecast.Bottleneck], "Finding": [Finding]}
    sources |= {"Auditing": [audits.Auditing], "Outlook": [outlook.Outlook], "Daily": [daily.Daily]}
    sources |= {name: [kind] for name, kind in vars(doctor_facts).items() if isinstance(kind, type)}
    if name in sources:
        text = "".join(map(inspect.getsource, sources[name]))
        return dict(re.findall(r"(?m)^    (\w+): .*?  # (.*)$", text))
    message = re.search(rf"(?ms)^message {name} \{{(.*?)^\}}", PROTO.read_text(encoding="utf-8"))
    return dict(re.findall(r"(?m)^  (?:\w+ )+(\w+) = \d+; +// (.*)$", message[1])) if message else {}


if __name__ == "__main__":
    print(document(), end="")
