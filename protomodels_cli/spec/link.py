"""An emulated link in one word, for the command line: `80mbit,25ms,2ms,0.01`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from protomodels_cli.errors import OptionError
from protomodels_cli.spec.schema import LinkSpec

FIELDS = ("bandwidth", "latency", "jitter", "loss")
LOOKS_LIKE = "BANDWIDTH,LATENCY[,JITTER[,LOSS]] or none; for example 80mbit,25ms or none,25ms,2ms,0.01"


def parse_link(text: str) -> LinkSpec:
    """Bandwidth, latency, jitter and loss in this order; `none` is no limit, alone or as the bandwidth."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > len(FIELDS):
        raise _wrong(text, f"{len(parts)} values where at most {len(FIELDS)} are allowed")
    fields: dict[str, Any] = dict(zip(FIELDS, parts, strict=False))
    if parts[0].lower() == "none":
        fields["bandwidth"] = None
    try:
        if "loss" in fields:
            fields["loss"] = float(fields["loss"])
        return LinkSpec(**fields)
    except ValidationError as e:
        first = e.errors()[0]
        raise _wrong(text, f"{first['loc'][0]} {first['input']!r}: {first['msg']}") from None
    except ValueError:
        raise _wrong(text, f"loss {fields['loss']!r}: must be a number from 0 to below 1") from None


def _wrong(text: str, rule: str) -> OptionError:
    return OptionError(f"link {text!r}: {rule}", f"write {LOOKS_LIKE}", "link")
