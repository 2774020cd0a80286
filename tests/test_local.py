"""Why a process of a local run ended, as the process itself recorded it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import corpus_of, make_spec

from protomodels_cli.coordinator.coordinator import Coordinator
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.errors import UserError
from protomodels_cli.launch import local


def test_a_coordinator_whose_disk_fails_records_why_it_ended(tmp_path: Path):
    """So that whoever started it reads that, and no log."""
    spec = make_spec()
    folder = open_run_dir(tmp_path / "run", spec, Path())
    (folder.path / "link").mkdir()  # where it writes its join link

    async def lead() -> None:
        coordinator = Coordinator(corpus_of(spec), folder, lambda text: None)
        await coordinator.run("127.0.0.1", "127.0.0.1", 0, lambda link: None)

    with pytest.raises(UserError) as failed:
        asyncio.run(lead())
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "coordinator.log").write_text("other words\n")
    found = local._failure(folder.path, "coordinator", failed.value.exit_code)
    assert found.kind == "process_failed"
    assert found.exit_code == failed.value.exit_code
    assert str(failed.value).splitlines()[0] in str(found)
