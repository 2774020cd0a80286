"""The export command's work: everything that needs torch."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path

from protomodels_cli.cli.interrupt import interrupted, raise_on_every_end
from protomodels_cli.cli.output import Format, beside_json, print_json
from protomodels_cli.export.card import kind_of
from protomodels_cli.export.out import check_free
from protomodels_cli.export.source import Source, open_source
from protomodels_cli.export.write import Exported, export
from protomodels_cli.huggingface.config import MODELING
from protomodels_cli.huggingface.segments import segments_of
from protomodels_cli.observe.bytes_done import BytesDone
from protomodels_cli.quantities import count, duration, plural, size


def run(place: str, out: Path, step: int | None, dtype: str | None, output: Format = "text") -> None:
    raise_on_every_end()
    started = time.monotonic()
    check_free(out)
    try:
        with beside_json(output), open_source(place, step, out.absolute().parent) as source:
            print(_header(source, place, out), flush=True)
            with BytesDone() as show:
                exported = export(source, out, dtype, lambda done, total: show("writing", done, total))
    except KeyboardInterrupt:
        interrupted(f"{out} was not written")
    seconds = time.monotonic() - started
    if output == "json":
        of_run = {"run": source.spec.name, "step": source.step, "steps": source.spec.steps}
        print_json({**of_run, "folder": str(out), **asdict(exported), "seconds": seconds})
        return
    print(_footer(source, out, exported, seconds))


def _header(source: Source, place: str, out: Path) -> str:
    spec = source.spec
    lines = [f"exporting {spec.name} after step {source.step:,} of {spec.steps:,}, from {place} to {out} …"]
    if source.tokenizer is None:
        lines.append("without a tokenizer: the run was trained on token ids (tokenizer.kind is none)")
    return "\n".join(lines)


def _footer(source: Source, out: Path, exported: Exported, seconds: float) -> str:
    lines = [
        f"wrote {out}: {kind_of(source.spec)} of {count(exported.parameters)} parameters in {exported.dtype}, "
        f"{size(exported.size)} in {duration(seconds)}, {plural(exported.files, 'file')} of weights",
        f"weights sha256 {exported.weights_sha256}",
    ]
    if segments_of(source.spec) is not None:
        lines.append(
            f"transformers needs {MODELING}.py, which lies there too, and trust_remote_code=True: segments with "
            "anchors or a stream of their own are no plain model"
        )
    if source.tokenizer is not None:
        lines.append(f"next: pmtrain generate {shlex.quote(str(out))} --prompt 'The '")
    return "\n".join(lines)
