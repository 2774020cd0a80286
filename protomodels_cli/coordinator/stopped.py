"""A run without a coordinator, as its directory tells. Reads, and changes nothing."""

from __future__ import annotations

from pathlib import Path

from protomodels_cli.coordinator.contributions import read
from protomodels_cli.coordinator.file_names import METRICS
from protomodels_cli.coordinator.reasons import CoordinatorStopped
from protomodels_cli.coordinator.run_dir import run_of
from protomodels_cli.coordinator.sentences import waiting
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.status import add_work, describe
from protomodels_cli.coordinator.summary import began
from protomodels_cli.coordinator.trust import believe
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def from_journal(run_dir: Path) -> pb.RunStatus:
    """Raises UserError where the journal cannot be believed."""
    spec, identity = run_of(run_dir)
    history, last = believe(run_dir, identity)
    status = describe(State(spec, (0, ""), history, folder=str(run_dir.resolve())), last, last, 0)
    if not history.over:
        stopped = CoordinatorStopped()
        status.phase = pb.RunStatus.NOT_RUNNING
        status.waiting_for, status.waiting_kind = waiting(stopped), stopped.kind
    add_work(status, began(run_dir / METRICS), read(run_dir / METRICS))
    del status.stages[:]  # nobody holds them now
    return status
