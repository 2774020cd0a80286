"""The work of `pmtrain init`: questions, the file, and what to expect of the run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

import typer

from protomodels_cli.cli.amounts import check_memory, memory_of
from protomodels_cli.cli.checks import speed_of
from protomodels_cli.cli.init_choose import TOKENS_EACH, Answers, Chosen, choose
from protomodels_cli.cli.init_refuse import refusal
from protomodels_cli.cli.init_shape import parse_size
from protomodels_cli.cli.init_text import data_of, fewer_bytes, loss_in_words, text_of
from protomodels_cli.cli.known_cards import Card, card_named
from protomodels_cli.cli.line import LINE, as_option, line_of
from protomodels_cli.cli.outlook import (
    CPU_WATTS,
    Outlook,
    day_in_words,
    first_line,
    line_in_words,
    outlook,
    reading_in_words,
)
from protomodels_cli.cli.output import Format, print_json
from protomodels_cli.cli.run_plan import crossing
from protomodels_cli.data.amount import ENOUGH, TEXT_EACH
from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.files import write_whole
from protomodels_cli.quantities import count, duration, figures, plural, rate, size
from protomodels_cli.spec.load import load_spec, with_absolute_paths

SIZE, DATA, PEERS, DEVICE = "124M", "builtin", 4, "gpu"
MEMORY = {"gpu": 11.0, "cpu": 4.0}
SPEED = {"gpu": "20tflops", "cpu": "50gflops"}
GPT2_IDS = 50257
LABEL = 13  # columns of what a figure is called
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What the command line says; None: not said."""

    size: str | None
    data: str | None
    peers: int | None
    link: str | None
    card: str | None
    device: str | None
    memory: str | None
    speed: str | None
    any_recipe: bool
    steps: int | None
    vocabulary: int | None
    name: str | None


def run(file: Path, asked: Asked, yes: bool, force: bool, output: Format) -> None:
    if file.is_dir() or (file.exists() and not force):
        raise OptionError(f"{file} exists already", "name another file, or replace it with --force", "exists")
    if not file.absolute().parent.is_dir():
        raise UserError(
            f"the folder {file.parent} does not exist", f"mkdir -p {shlex.quote(str(file.parent))}", "folder"
        )
    answers, card, link = _answers(file, asked, asking=not yes and sys.stdin.isatty())
    chosen = choose(answers)
    if chosen is None:
        raise refusal(answers)
    watts = card.watts if card else CPU_WATTS if asked.device == "cpu" else None
    comes_to = outlook(
        with_absolute_paths(chosen.cut, file.absolute().parent),
        Path(),
        answers.link,
        answers.speed,
        chosen.forecast,
        chosen.saving,
        True,
        watts,
    )
    write_whole(file, text_of(chosen, reading_in_words(comes_to, chosen.spec)).encode())
    assert load_spec(file) == chosen.spec, "the file does not say what was chosen"
    if output == "json":
        print_json(_for_programs(file, chosen, comes_to))
        return
    for line in _in_words(chosen, comes_to, file, line_in_words(link), card).splitlines():
        print(line if line.startswith("  pmtrain") else _wrapped(line))


def _for_programs(file: Path, chosen: Chosen, comes_to: Outlook) -> dict[str, Any]:
    a = chosen.answers
    return {
        "file": str(file),
        "link": as_option(a.link),
        "peers": a.peers,
        "spares": chosen.spares,
        "memory": a.memory,
        "flops": a.speed,
        "outlook": asdict(comes_to),
        "forecast": asdict(chosen.forecast),
        "chosen": crossing(chosen.cut),
    }


def _answers(file: Path, asked: Asked, asking: bool) -> tuple[Answers, Card | None, str]:
    def answer(said: T | None, question: str, default: T, check: Callable[[T], object]) -> T:
        if said is not None or not asking:
            value = default if said is None else said
            check(value)
            return value
        while True:
            value = typer.prompt(question, default=default)
            try:
                check(value)
            except OptionError as e:
                print(e, file=sys.stderr)
            else:
                return value

    def data(text: str) -> tuple[dict[str, object], bool]:
        return _data(text, file)

    sized = answer(asked.size, "How many parameters (10M, 124M, 1.5B, 8B)?", SIZE, parse_size)
    source = answer(asked.data, f"What to train on {_wanted(sized, asked)}?", DATA, data)
    peers = answer(asked.peers, "How many machines will join?", PEERS, _is_positive)
    link = answer(asked.link, "The slowest one's connection, upload and delay?", LINE, line_of)
    named = asked.card
    if named is None and asking and asked.device is None:
        named = answer(None, "Their card (RTX 3090, …; gpu or cpu if it has no name here)?", DEVICE, _is_card)
    card = card_named(named) if named is not None and named not in MEMORY else None
    device = asked.device or (named if named is not None and named in MEMORY else DEVICE)
    usual = f"{card.memory if card else MEMORY[device]:g}gib"
    memory = memory_of(answer(asked.memory, "Free memory of the smallest?", usual, check_memory))
    assert memory is not None
    speed = speed_of(asked.speed) or (card.speed if card else speed_of(SPEED[device]))
    assert speed is not None
    section, _ = data(source)
    ids = asked.vocabulary or GPT2_IDS if section["source"] == "bin" else None
    name = asked.name or re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._")[:64] or "run"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise OptionError(
            f"--name {name}: letters, digits, - . _ only, 64 at most", "write for example first-run", "name"
        )
    found = Answers(
        name,
        parse_size(sized),
        section,
        line_of(link),
        peers,
        memory,
        speed,
        asked.steps,
        ids,
        asked.any_recipe,
    )
    return found, card, link


def _wanted(sized: str, asked: Asked) -> str:
    """How much of it would be enough: said before it is asked for."""
    if asked.steps is not None:
        return "(files, folder/, hf:NAME, builtin)"
    tokens = TOKENS_EACH * parse_size(sized) / ENOUGH
    return f"(files, folder/, hf:NAME, builtin; about {figures(TEXT_EACH * tokens / 1e9)} GB of text are enough)"


def _wrapped(line: str) -> str:
    """Within the terminal, with what a label is for below it."""
    columns = min(120, shutil.get_terminal_size((120, 24)).columns)
    below = " " * LABEL if line.startswith("  ") else ""
    return textwrap.fill(line, columns, subsequent_indent=below, break_on_hyphens=False)


def _is_positive(value: float) -> None:
    if value <= 0:
        raise OptionError(f"{value}: must be above 0", "write for example 4", "positive")


def _is_card(value: str) -> None:
    if value not in MEMORY:
        card_named(value)


def _data(text: str, file: Path) -> tuple[dict[str, object], bool]:
    section, is_files = data_of(text, lambda path: os.path.relpath(os.path.expanduser(path), file.absolute().parent))
    for path in section["files"] if is_files else ():
        if not glob(str(file.absolute().parent / path), recursive=True):
            raise OptionError(f"--data {text}: there is nothing at {path}", "name files, a folder or a glob", "data")
    return section, is_files


def _in_words(chosen: Chosen, comes_to: Outlook, file: Path, line: str, card: Card | None) -> str:
    a, f, spec = chosen.answers, chosen.forecast, chosen.spec
    shape, most, memory = chosen.shape, max(stage.memory for stage in f.stages), f"{a.memory / 2**30:g}gib"
    quoted = shlex.quote(str(file))
    lines = [
        first_line(comes_to, f),
        f"{line}{file}: {shape.layers} layers of width {shape.width}, context {shape.context}, vocabulary "
        f"{shape.vocabulary:,}; {spec.subspace.form}"
        + (f", k = {spec.subspace.k}" if spec.form.has_basis else "")
        + f", {spec.wire.forward}",
        "",
        f"  peers      {plural(chosen.stages, 'stage')}, one on each of {plural(chosen.stages, 'peer')}"
        + (f"; {plural(chosen.spares, 'peer')} more would be spares: {_why_spares(chosen)}" if chosen.spares else ""),
        f"  memory     at most {size(most)} of {size(a.memory)} on a peer",
    ]
    if chosen.stages > 1:
        up, down = (size(int(f.bytes_per_step[leg])) for leg in ("forward", "backward"))
        lines.append(
            f"  bytes      {up} forward and {down} backward a step over each boundary, "
            f"{figures(fewer_bytes(chosen))} × fewer than float32"
        )
    lines += [
        f"  step       {duration(f.step_seconds)} ({rate(f.tokens_per_s, 'tok/s')}); with an ideal link "
        f"{duration(f.compute_seconds)}",
        f"  the run    {plural(spec.steps, 'step')}, {count(comes_to.tokens)} tokens, "
        f"about {duration(comes_to.seconds)} where nothing fails",
        f"  loss       what compression costs: {loss_in_words(chosen)}",
        f"  costs      {day_in_words(comes_to, card is not None)}",
        f"  data       {reading_in_words(comes_to, spec, option=True)}",
        f"  snapshots  every {duration(chosen.saving.interval_seconds)}; {size(chosen.saving.disk_bytes)} of the "
        "coordinator's disk",
        "",
        "next:",
        f"  pmtrain plan {quoted} --link {as_option(a.link)} --memory {memory} --speed {_speed(a.speed)}",
        f"  pmtrain coordinator {quoted}",
    ]
    return "\n".join(lines)


def _why_spares(chosen: Chosen) -> str:
    if chosen.stages == 1:
        return "the model fits on one, and over these lines all together would be slower"
    return "with a stage more the run would not be at its loss sooner"


def _speed(flops: float) -> str:
    return f"{flops / 1e12:g}tflops" if flops >= 1e12 else f"{flops / 1e9:g}gflops"
