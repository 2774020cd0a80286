"""`scripts/wanlab`: a command, or a whole run, across emulated hosts.

scripts/wanlab --hosts 4 --link 80mbit,25ms -- COMMAND…     on host 0; the others' addresses are in its environment
scripts/wanlab --hosts 5 --link 80mbit,25ms --run SPEC.yaml the coordinator on host 0, a peer on each of the others
scripts/wanlab nat                                          a run across homes behind routers: the path of each link
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from protomodels_cli.bench import natlab
from protomodels_cli.errors import EXIT_INTERRUPTED, OptionError, UserError
from protomodels_cli.launch.hosts import Hosts, require
from protomodels_cli.launch.local import local_run, peers_of
from protomodels_cli.spec import RunSpec, load_spec
from protomodels_cli.spec.link import LOOKS_LIKE, parse_link
from protomodels_cli.spec.load import with_absolute_paths

LOOK_SECONDS = 0.1


def main(argv: Sequence[str]) -> int:
    try:
        words = list(argv)
        if words[:1] == ["nat"]:
            return natlab.main(words[1:])
        cut = words.index("--") if "--" in words else len(words)
        options, command = _options(words[:cut]), words[cut + 1 :]
        link = parse_link(options.link)
        if (options.run is None) == (not command):
            raise OptionError(
                "give either --run or a command, not both or none", "write --run SPEC, or -- COMMAND…", "what_to_run"
            )
        require()
        if options.run is None:
            with Hosts(options.hosts, link) as hosts:
                return _run_command(hosts, command)
        spec = with_absolute_paths(load_spec(options.run), options.run.parent)
        _check_peers(spec, options.hosts - 1)
        folder = options.run_dir or Path("runs") / time.strftime(f"{spec.name}-wan-%Y%m%d-%H%M%S")
        with Hosts(options.hosts, link) as hosts:
            return run_spec(hosts, spec, folder, options.device)
    except UserError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_spec(hosts: Hosts, spec: RunSpec, folder: Path, device: str = "cpu") -> int:
    """A run with a peer on every host but the first, to its end; returns the coordinator's exit code.

    The coordinator speaks for itself; what the peers say is in the folder's logs/."""
    with local_run(spec, folder, device, hosts=hosts, speak=True) as running:
        waiting = dict(running.peers)
        while running.coordinator.poll() is None:
            for name in [name for name, peer in waiting.items() if peer.poll() is not None]:
                if code := _exit_code(waiting.pop(name)):
                    said = f"{name} ended with exit code {code}: look into {folder / 'logs' / name}.log"
                    print(said, file=sys.stderr, flush=True)
            time.sleep(LOOK_SECONDS)
        return _exit_code(running.coordinator)


def _run_command(hosts: Hosts, command: Sequence[str]) -> int:
    addresses = " ".join(map(hosts.address, range(hosts.count)))
    places = {"PMTRAIN_HOSTS": addresses, "PMTRAIN_NAMESPACES": " ".join(hosts.names)}
    return _exit_code(subprocess.run(hosts.command(0, command), env={**os.environ, **places}))


def _check_peers(spec: RunSpec, peers: int) -> None:
    """With too few peers the run would never start, and any more would stay spares."""
    needed = peers_of(spec)
    if peers != needed:
        what = f"--hosts {peers + 1}: leaves {max(0, peers)} hosts for peers, and {spec.name} needs {needed}"
        raise OptionError(
            what, f"use --hosts {needed + 1}: one for the coordinator and one for each stage", "hosts_count"
        )


def _exit_code(process: subprocess.Popen[bytes] | subprocess.CompletedProcess[bytes]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode  # as shells count signals


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/wanlab",
        usage="%(prog)s --hosts N --link LINK (-- COMMAND… | --run SPEC [--run-dir DIR] [--device DEVICE])",
        description="Run a command, or a whole pmtrain run, across emulated hosts with a home connection each. "
        "COMMAND runs on host 0, with all addresses in PMTRAIN_HOSTS and all namespaces in PMTRAIN_NAMESPACES "
        "(`ip netns exec NAMESPACE …` runs something on another host).",
    )
    parser.add_argument(
        "--hosts", type=int, required=True, metavar="N", help="number of hosts, the coordinator's included"
    )
    parser.add_argument("--link", default="none", help=f"connection of every host: {LOOKS_LIKE}; default: none")
    parser.add_argument("--run", type=Path, metavar="SPEC", help="the spec of a run")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run directory; default: a new folder in runs/")
    parser.add_argument("--device", default="cpu", help="device that every peer computes on; default: cpu")
    return parser.parse_args(words)


if __name__ == "__main__":
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the hosts must go in every case
        signal.signal(sign, _interrupt)
    sys.exit(main(sys.argv[1:]))
