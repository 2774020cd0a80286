"""The first lines of `init` and `plan`: whether a run fits, how long it takes, what limits it, what it takes a day.

Pure, but for the sizes of the data's files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protomodels_cli.cli.line import DELAY, is_whole
from protomodels_cli.cost.daily import DAY, Daily, daily
from protomodels_cli.cost.forecast import Forecast
from protomodels_cli.cost.saving import Saving
from protomodels_cli.data.amount import ENOUGH, bytes_each, tokens_of
from protomodels_cli.quantities import count, duration, figures, plural
from protomodels_cli.spec.schema import LinkSpec, RunSpec

GPU_WATTS, CPU_WATTS = 250.0, 65.0  # where no card is named
GPU_FROM = 1e12  # operations a second: a processor has less


@dataclass(frozen=True)
class Reading:
    """How much a run reads, of how much."""

    tokens: int
    data_tokens: float | None  # null: not known before they are read
    epochs: float | None


def reading(spec: RunSpec, base: Path) -> Reading:
    tokens, known = spec.steps * spec.batch.size * spec.model.context, tokens_of(spec, base)
    return Reading(tokens, known, tokens / known if known else None)


@dataclass(frozen=True)
class Outlook:
    """What a run comes to."""

    fits: bool | None  # into each peer's memory; null: nobody said how much that is
    seconds: float  # of the whole run, where nothing fails
    tokens: int  # that it reads
    data_tokens: float | None  # that the data have, about; null: not known before they are read
    epochs: float | None  # times that each token of the data is read
    daily: Daily  # what it takes from its people


def outlook(
    spec: RunSpec,
    base: Path,
    link: LinkSpec,
    flops: float,
    forecast: Forecast,
    saving: Saving,
    fits: bool | None,
    watts: float | None,
) -> Outlook:
    reads = reading(spec, base)
    return Outlook(
        fits,
        spec.steps * forecast.step_seconds,
        reads.tokens,
        reads.data_tokens,
        reads.epochs,
        daily(forecast, saving, link, watts or (GPU_WATTS if flops >= GPU_FROM else CPU_WATTS)),
    )


def limit_in_words(forecast: Forecast) -> str:
    match forecast.bottleneck.kind:
        case "compute":
            return "Computing is the limit."
        case "bandwidth":
            return "Your upload is the limit."
        case "latency":
            return "The delay of your lines is the limit."
        case "in_flight":
            return "batch.in_flight is the limit."
        case "coordinator":
            return "The way to the coordinator is the limit."


def line_in_words(text: str) -> str:
    """Of a --link that says a rate alone."""
    return "" if is_whole(text) else f"--link {text} says no delay: {DELAY} each way is assumed.\n"


def day_in_words(found: Outlook, named: bool) -> str:
    """Of a day, or of the whole run where it is shorter. `named`: by --card."""
    day, part = found.daily, min(1.0, found.seconds / DAY)
    when = "A day takes" if part == 1 else "The run takes"
    upload = f"up to {figures(part * day.upload_bytes / 1e9)} GB of upload on a line and " if day.upload_bytes else ""
    watts = f"{figures(day.watts)} W a {'card' if day.watts != CPU_WATTS else 'processor'}"
    return (
        f"{when} {upload}about {figures(part * day.kwh)} kWh of electricity on all machines "
        f"({watts}{'' if named else ', assumed: --card names one'})"
    )


def reading_in_words(found: Outlook | Reading, spec: RunSpec, option: bool = False) -> str:
    """How often the data are read; and where that is too often, how much would be enough. `option`: for --data."""
    data, wanted = spec.data, found.tokens / ENOUGH
    named = f"hf:{data.dataset}" if data.source == "hf" else data.source
    enough = f"{count(wanted)} tokens (about {figures(wanted * bytes_each(spec) / 1e9)} GB) would be enough"
    if found.data_tokens is None or found.epochs is None:
        return f"{named}: how many tokens it has is not known before it is read; {enough}"
    times = f"each would be read {plural(round(found.epochs), 'time')}" if found.epochs >= 1.5 else "none is read twice"
    has = f"{named} has about {count(found.data_tokens)} tokens: {times}"
    if found.epochs <= ENOUGH:
        return has
    return f"{has}; {enough}{', as --data my-texts/ or --data hf:HuggingFaceFW/fineweb-edu' if option else ''}"


def first_line(found: Outlook, forecast: Forecast) -> str:
    fits = "" if found.fits is None else "Fits. " if found.fits else "Does not fit. "
    return f"{fits}{duration(found.seconds)}. {limit_in_words(forecast)}"
