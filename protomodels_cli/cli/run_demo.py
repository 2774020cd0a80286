"""The work of `pmtrain demo`: start the processes, show the run, and print a summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from protomodels_cli.cli.checks import check_outputs
from protomodels_cli.cli.folders import claim
from protomodels_cli.cli.interrupt import interrupted, leave_on_ctrl_c, raise_on_every_end
from protomodels_cli.cli.summary import in_words, read_summary
from protomodels_cli.coordinator.watching import PAGE
from protomodels_cli.errors import RunStopped, UserError
from protomodels_cli.launch.cable import cable
from protomodels_cli.launch.chaos import RECOVERY_SECONDS, Chaos
from protomodels_cli.launch.local import LocalRun, local_run, peers_of
from protomodels_cli.observe.screen import BEFORE_THE_FIRST_STEP, Drawn, Lines, Shown
from protomodels_cli.quantities import duration, plural
from protomodels_cli.spec.cut import cut_evenly
from protomodels_cli.spec.load import parse_spec, spec_from
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.client import Operator, operator
from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

LOOK_SECONDS = 0.25
LOOK_OFTEN = 0.05
MODEL = "model"  # in the run directory
PROMPT, SAMPLES, TOKENS = "The people of the United States", 3, 40


def introduction(spec: RunSpec, stages: int) -> str:
    """The first lines of the demo."""
    return (
        f"pmtrain demo: one coordinator and {stages} peers on this machine train one model of "
        f"{spec.model.layers} layers.\nEach peer holds a slice of the layers and sends its neighbours "
        f"{spec.subspace.k} numbers per token, where a dense pipeline sends {spec.model.width}."
    )


def run(
    steps: int | None,
    stages: int,
    device: str,
    run_dir: Path | None,
    json_file: Path | None,
    seed: int | None,
    options: list[str],
) -> None:
    """`options` go to the coordinator and to all peers."""
    check_outputs(json_file)
    if device != "cpu":  # which every machine has; any other is looked at before peers are started in vain
        from protomodels_cli.worker.device import choose

        choose(device)
    spec = _spec(steps, stages)
    folder = claim(run_dir, "demo")
    console = Console()
    raise_on_every_end()
    console.print(introduction(spec, stages) + "\n", highlight=False, soft_wrap=True)
    faults: list[dict[str, Any]] = []
    try:
        if seed is None:
            with local_run(spec, folder, device, options=options) as running:
                _tell_of_page(console, folder)
                asyncio.run(_watch(console, running))
                if running.coordinator.wait(timeout=60):
                    raise running.failure()
        else:
            faults = _with_chaos(console, spec, folder, device, seed, options)
    except KeyboardInterrupt:
        interrupted(f"metrics, snapshots and logs up to here are in {folder}")
    summary = read_summary(folder)
    if seed is not None:
        summary["faults"] = faults
        console.print(_faults_in_words(faults, summary["steps_redone"]), highlight=False, soft_wrap=True)
    console.print(in_words(summary), highlight=False, soft_wrap=True)
    _write(summary, json_file)
    where = f"the run itself is done, and in {folder}; `pmtrain export {folder} OUT` writes its model"
    leave_on_ctrl_c(where)
    try:
        summary["text"] = _text_of_the_model(console, folder)
    except KeyboardInterrupt:
        interrupted(where)
    _write(summary, json_file)
    console.print(
        f"\nEverything is in {folder}: metrics.jsonl, snapshots/, logs/, and in {MODEL}/ the model for Hugging Face's\n"
        f"transformers. `pmtrain generate {folder / MODEL} --prompt 'My fellow citizens'` writes more of it.\n"
        f"Next: `pmtrain reference {folder}/run.yaml` trains the same model in one process"
        + (", with the same sha256 at the end" if device == "cpu" else "")
        + ";\n"
        f"`pmtrain coordinator {folder}/demo.yaml` leads the same run for peers elsewhere.",
        highlight=False,
        soft_wrap=True,
    )


def _write(summary: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")


def _text_of_the_model(console: Console, folder: Path) -> str:
    """Export the model, and let it write a few lines."""
    # Here, so that a demo begins at once: torch takes seconds to import.
    import torch

    from protomodels_cli.export.source import open_source
    from protomodels_cli.export.write import export
    from protomodels_cli.inference.generate import Sampling, generate, limit_threads
    from protomodels_cli.inference.load import load
    from protomodels_cli.inference.text import Detokenizer, printable

    raise_on_every_end()
    with open_source(str(folder), None, folder) as source:
        export(source, folder / MODEL, None, lambda done, total: None)
    loaded = load(str(folder / MODEL), "cpu", torch.float32)
    limit_threads(loaded.decoder)
    assert loaded.tokenizer is not None
    console.print(f"\nthe model is in {folder / MODEL}; it goes on from “{PROMPT}” like this:", highlight=False)
    texts = []
    for seed in range(SAMPLES):
        prompt = loaded.prompt(PROMPT)
        words = Detokenizer(loaded.tokenizer, prompt)
        sampling = Sampling(TOKENS, temperature=0.7, top_p=0.9, seed=seed)
        texts.append(PROMPT + "".join(map(words.push, generate(loaded, prompt, sampling))) + words.end())
        shown = textwrap.indent(textwrap.fill(f"{printable(' '.join(texts[-1].split()))} …", console.width - 2), "  ")
        console.print(shown, highlight=False, soft_wrap=True, markup=False)
    return "\n".join(texts)


def _with_chaos(
    console: Console, spec: RunSpec, folder: Path, device: str, seed: int, options: list[str]
) -> list[dict[str, Any]]:
    """With a spare, and with every peer connected over a cable of its own. Returns the injected faults."""
    peers = range(1, peers_of(spec) + 2)
    with contextlib.ExitStack() as cables:
        laid = {i: cables.enter_context(cable()) for i in peers}
        with local_run(
            spec,
            folder,
            device,
            join_options=["--no-listen"],  # so that all that a peer sends goes over its cable
            through=lambda i, link: laid[i].through(link),
            spares=1,
            options=options,
        ) as running:
            _tell_of_page(console, folder)
            chaos = Chaos(seed, running, {f"peer-{i}": laid[i] for i in peers}, console.print)
            asyncio.run(_watch(console, running, chaos))
            running.coordinator.wait(timeout=60)
    return chaos.faults


def _tell_of_page(console: Console, folder: Path) -> None:
    if (links := folder / PAGE).exists():
        console.print(f"watch it in a browser: {links.read_text().split()[0]}\n", highlight=False, soft_wrap=True)


def _faults_in_words(faults: list[dict[str, Any]], redone: int) -> str:
    def became(fault: dict[str, Any]) -> str:
        if fault["stalled"]:
            return f": no step within {duration(RECOVERY_SECONDS)}"
        seconds = fault["seconds_to_next_step"]
        return "" if seconds is None else f": next step after {duration(seconds)}"

    rows = [f"  step {f['step']:>4}  {f['what']}{became(f)}" for f in faults]
    return "\n".join([f"{plural(len(faults), 'fault')}, {plural(redone, 'step')} redone:", *rows, ""])


def _spec(steps: int | None, stages: int) -> RunSpec:
    text = resources.files("protomodels_cli.cli").joinpath("demo.yaml").read_text(encoding="utf-8")
    spec = parse_spec(text)
    fields = spec.model_dump(mode="json") | {"name": "demo", "stages": cut_evenly(spec, stages)}
    if steps is not None:
        fields["steps"] = steps
        warmup = fields["optimizer"]["schedule"]
        warmup["warmup_steps"] = min(warmup["warmup_steps"], steps)
    return spec_from(fields)


async def _watch(console: Console, running: LocalRun, chaos: Chaos | None = None) -> None:
    """Show the run until it is over."""
    async with operator(running.link) as source:
        with Drawn(console) if console.is_terminal else Lines() as show:
            making = asyncio.create_task(chaos.make()) if chaos is not None else None
            try:
                await _follow(running, source, show, chaos, making)
            finally:
                if making is not None:
                    making.cancel()


async def _follow(
    running: LocalRun,
    source: Operator,
    show: Shown,
    chaos: Chaos | None = None,
    making: asyncio.Task[None] | None = None,
) -> None:
    while chaos is not None or running.coordinator.poll() is None:
        if making is not None and making.done():
            await making  # raises what ended it
        code = running.coordinator.poll()
        if code == 0:
            return
        if code is not None and code > 0:  # by itself: who is killed has a code below zero
            raise running.failure()
        try:
            status = await source.status()
        except UserError:  # the coordinator has closed its port, or is slow: the loop's condition knows
            await asyncio.sleep(LOOK_SECONDS)
            continue
        show(status)
        if chaos is not None:
            chaos.saw(status)
        if status.phase == RunStatus.DONE:
            return
        if status.phase == RunStatus.PAUSED:
            raise RunStopped(status.reason, f"look into {running.folder}/logs", "paused")
        if chaos is None and status.phase in BEFORE_THE_FIRST_STEP:
            for name, peer in running.peers.items():
                if peer.poll():
                    raise running.failure(name)
        await asyncio.sleep(LOOK_SECONDS if chaos is None else LOOK_OFTEN)
