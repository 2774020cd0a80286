"""A process of the pool: a line of JSON in, the job done with the real code, a line of JSON out."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from injection import fault


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code under test prints goes to the log
    faulthandler.register(signal.SIGUSR1)
    import protomodels_cli.coordinator.coordinator
    import protomodels_cli.worker.join  # noqa: F401

    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        result: dict[str, Any] = {"said": []}
        with fault(Path(job["marks"]), **job.get("fault", {})):
            try:
                result["exit"] = asyncio.run(
                    lead(job, result) if job["kind"] == "coordinator" else take_part(job, result)
                )
            except Exception as e:
                result |= {"exit": getattr(e, "exit_code", 1), "error": str(e), "kind": type(e).__name__}
                result["reason"] = getattr(e, "kind", "")  # the coordinator's, or the peer's own
        print(json.dumps(result), file=out, flush=True)


async def lead(job: dict[str, Any], result: dict[str, Any]) -> int:
    from protomodels_cli.coordinator.coordinator import Coordinator
    from protomodels_cli.coordinator.events import StopRun
    from protomodels_cli.coordinator.run_dir import open_run_dir
    from protomodels_cli.data.prepare import prepare
    from protomodels_cli.spec import spec_from

    spec, path = spec_from(job["spec"]), Path(job["run_dir"])
    folder = open_run_dir(path, spec, base=path)
    elsewhere = [("127.0.0.1", port) for port in job.get("also_at", [])]
    coordinator = Coordinator(prepare(spec), folder, result["said"].append, elsewhere)
    port = before.port if (before := folder.last_link()) else 0
    leading = asyncio.create_task(coordinator.run("127.0.0.1", "127.0.0.1", port, lambda link: None))
    while not leading.done():
        await asyncio.sleep(0.05)
        if (folder.path / "stop").exists():
            coordinator._interrupted.set()
            break
        if coordinator.state.history.paused is not None:  # nobody comes to look at it
            coordinator.submit(StopRun())
    return await leading


async def take_part(job: dict[str, Any], result: dict[str, Any]) -> int:
    from protomodels_cli.wire.join_link import JoinLink
    from protomodels_cli.worker.join import Options, join

    devices = tuple(job.get("devices", ["cpu"]))
    options = Options(JoinLink.parse(job["link"]), devices, job["name"], Path(job["dir"]), 0, 86400.0)
    return await join(options, result["said"].append)


if __name__ == "__main__":
    main()
