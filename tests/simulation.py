"""A run in virtual time: the real state machine, and a model of everything around it that can fail.

A seed decides what is delayed, lost, doubled, killed, frozen, cut and spoilt, and when. After every event the rules of
simulated_rules.py are checked; at the end, with enough peers and a quiet network, the run must finish with the numbers
of a run to which nothing happened. A stage's numbers are modelled by hashes of all that went into them.

    python tests/simulation.py 10000            that many seeds
    python tests/simulation.py --seed 7 --trace what happens with one of them
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from simulated_words import Violation
from simulated_world import World


def simulate(seed: int, log: list[str] | None = None, peers: int = 0) -> World:
    """What the world has come to. Raises Violation."""
    calm = World(seed, peers, calm=True)
    expected = calm.live(0)
    world = World(seed, peers, log=log)
    found = world.live(world.random.randrange(5, 60))
    if found != expected:
        raise Violation("the weights are not those of a run to which nothing happened")
    return world


def try_seed(seed: int) -> tuple[int, str]:
    try:
        simulate(seed)
    except Exception as e:
        return seed, f"{type(e).__name__}: {e}"
    return seed, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--peers", type=int, default=0)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    if options.seed is not None:
        log: list[str] = []
        try:
            simulate(options.seed, log, options.peers)
        finally:
            if options.trace:
                print("\n".join(log))
        print(f"seed {options.seed}: no violation")
        return
    failed = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for seed, why in pool.map(try_seed, seeds, chunksize=20):
            if why:
                failed.append(seed)
                print(f"seed {seed}: {why}   (again: scripts/simulate.sh --seed {seed} --trace)", flush=True)
    print(f"{options.seeds} seeds, {len(failed)} violations")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
