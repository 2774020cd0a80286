"""What `init` says where no good run is possible: why, and the nearest that is. Pure.

Every suggestion was tried by the same rules: typed as it stands here, it is not refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from protomodels_cli.cli.init_choose import Answers, least_need, possible, quickest
from protomodels_cli.cli.init_shape import SMALLEST
from protomodels_cli.errors import OptionError
from protomodels_cli.quantities import count, duration, plural, size

MOST_MBIT = 10_000
GIB = 2**30
T = TypeVar("T")


def refusal(answers: Answers) -> OptionError:
    """Of answers for which `choose` finds nothing."""
    need = least_need(answers)
    return _does_not_fit(answers, need) if need > answers.memory else _takes_too_long(answers, quickest(answers))


def _does_not_fit(answers: Answers, need: int) -> OptionError:
    ways = [*_more_peers(answers), *_more_memory(answers, need), *_smaller(answers)]
    return OptionError(
        f"a model of {count(answers.parameters)} parameters does not fit {plural(answers.peers, 'peer')} with "
        f"{size(answers.memory)} each: the largest stage needs {size(need)} at least",
        _one_of(ways),
        "does_not_fit",
    )


def _takes_too_long(answers: Answers, seconds: float) -> OptionError:
    ways = [*_more_peers(answers), *_more_memory(answers, answers.memory), *_faster_line(answers), *_smaller(answers)]
    return OptionError(
        f"a model of {count(answers.parameters)} parameters would take {plural(answers.peers, 'such peer')} "
        f"{duration(seconds)} or more; a run may take a year at most",
        _one_of(ways),
        "takes_too_long",
    )


def _one_of(ways: list[str]) -> str:
    return f"one of {', '.join(ways)}" if len(ways) > 1 else ways[0] if ways else "a smaller model on more peers"


def _more_peers(answers: Answers) -> Iterator[str]:
    found = _first(_counts(answers.peers), lambda n: possible(replace(answers, peers=n)))
    if found is not None:
        yield f"--peers {found} with this memory"


def _more_memory(answers: Answers, least: int) -> Iterator[str]:
    def gib(n: int) -> float:
        return math.ceil(n / GIB * 10) / 10

    sizes = [gib(int(least * 1.1**i)) for i in range(20)]
    found = _first(sizes, lambda n: possible(replace(answers, memory=int(n * GIB))))
    if found is not None and found * GIB > answers.memory:
        yield f"--memory {found:g}gib on every peer"


def _faster_line(answers: Answers) -> Iterator[str]:
    now = answers.link.bits_per_second / 1e6
    if math.isinf(now):
        return
    wanted = [n for i in range(1, 40) if now < (n := math.ceil(now * 1.25**i)) <= MOST_MBIT]

    def faster(mbit: int) -> Answers:
        return replace(answers, link=answers.link.model_copy(update={"bandwidth": f"{mbit}mbit"}))

    found = _first(wanted, lambda n: possible(faster(n)))
    if found is not None:
        yield f"--link {found}mbit,{answers.link.latency}"


def _smaller(answers: Answers) -> Iterator[str]:
    sizes, n = [], answers.parameters
    while (n := float(f"{n * 0.9:.1e}")) >= SMALLEST:
        sizes.append(n)
    found = _first(sizes, lambda n: possible(replace(answers, parameters=n)))
    if found is not None:
        yield f"--size {count(found).replace(' ', '')} on these peers"


def _counts(peers: int) -> list[int]:
    """Up to twice as many, and eight more."""
    found, n = [], peers + 1
    while n <= 2 * peers + 8:
        found.append(n)
        n += max(1, n // 8)
    return found


def _first(wanted: list[T], good: Callable[[T], bool]) -> T | None:
    """The first of them that is good, by halving, where all after it are good as well. None: the last one is not."""
    if not wanted or not good(wanted[-1]):
        return None
    low, high = 0, len(wanted) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(wanted[middle]) else (middle + 1, high)
    return wanted[low]
