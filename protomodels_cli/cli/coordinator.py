"""`pmtrain coordinator SPEC`: lead a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from protomodels_cli.cli.interrupt import leave_on_ctrl_c
from protomodels_cli.cli.say import say

DEFAULT_PORT = 7420


def coordinator(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC", help="The run spec.")],
    host: Annotated[
        str | None, typer.Option(help="Name or address of this machine for the join line. Default: found out.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The one public TCP port; 0: any free one.")
    ] = DEFAULT_PORT,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives. Default: a new folder in runs/.")] = None,
) -> None:
    """Lead a run: hand out stages, grant steps, keep the books. Needs no GPU."""
    from protomodels_cli.spec import load_spec

    spec = load_spec(spec_file)
    leave_on_ctrl_c()

    from protomodels_cli.cli.folders import claim
    from protomodels_cli.coordinator.coordinator import Coordinator
    from protomodels_cli.coordinator.run_dir import open_run_dir
    from protomodels_cli.data.prepare import prepare
    from protomodels_cli.wire.channels import bind_address, own_address

    print(f"reading {spec.data.source} text and its tokens …", flush=True)
    corpus = prepare(spec, spec_file.parent)
    folder = open_run_dir(claim(run_dir, spec.name), spec, spec_file.parent)
    public = host or own_address()

    def announce(link: str) -> None:
        say(f"run directory: {folder.path}\nothers join with:\n\n    pmtrain join '{link}'\n")

    async def lead() -> int:
        return await Coordinator(spec, corpus, folder, say).run(bind_address(public), public, port, announce)

    code = asyncio.run(lead())
    if code == 0:
        from protomodels_cli.cli.summary import in_words, read_summary

        say(in_words(read_summary(folder.path), spec))
    raise typer.Exit(code)
