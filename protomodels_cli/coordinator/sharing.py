"""What peers bring where several of them share a card or a machine, and who then holds what. Pure.

A card is one budget: the stages on it must fit it together, whatever each of them takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from protomodels_cli.coordinator import no_placement, reasons
from protomodels_cli.coordinator.filling import fill
from protomodels_cli.coordinator.peers import Peer, Peers
from protomodels_cli.coordinator.placement import Offer, Placement, place
from protomodels_cli.cost.memory import stage_memory
from protomodels_cli.spec.cut import spans
from protomodels_cli.spec.schema import RunSpec

Needs = Mapping[str, int]  # bytes of a peer's stage, by the peer's id
NOTHING: Needs = {}


def place_on_cards(spec: RunSpec, peers: Collection[Peer]) -> Placement | no_placement.NoPlacement:
    """The best placement on equal shares of cards; else, as stages differ in size, any that their cards can hold."""
    shared, whole = offers(peers), offers(peers, whole=True)
    found = place(spec, shared)
    if isinstance(found, Placement) or whole == shared:
        return found
    other = place(spec, whole)
    if isinstance(other, Placement) and _fit(peers, needs(spec, peers, other.layers, other.holders)):
        return other
    return found


def fill_on_cards(
    spec: RunSpec,
    layers: Sequence[int],
    held: Mapping[int, str],
    peers: Collection[Peer],
    cost: Callable[[str, int], float],
) -> dict[int, str] | reasons.StagesWithoutPeer:
    """A peer for each stage of this cut that none has, beside those that hold theirs; or what is missing."""
    empty = [stage for stage in range(len(layers)) if stage not in held]
    taken = needs(spec, peers, layers, [held.get(stage, "") for stage in range(len(layers))])
    shared, whole = offers(peers, taken), offers(peers, taken, whole=True)
    found = fill(spec, layers, empty, shared, cost)
    if isinstance(found, dict) or whole == shared:
        return found
    other = fill(spec, layers, empty, whole, cost)
    if isinstance(other, dict):
        holders = {**held, **other}
        if _fit(peers, needs(spec, peers, layers, [holders[stage] for stage in range(len(layers))])):
            return other
    return found


def fits_beside(
    spec: RunSpec, peers: Peers, layers: Sequence[int], holders: Sequence[str], stage: int, peer: str
) -> bool:
    """Whether the cards of this peer can hold this stage while those who hold one still do."""
    if (new := peers.get(peer)) is None:
        return False
    here = [known for holder in holders if (known := peers.get(holder)) is not None]
    others = [peer if i == stage else holder for i, holder in enumerate(holders)]
    together = [*(known for known in here if not _are_apart(known, new)), new]
    return _fit(together, {**needs(spec, together, layers, holders), **needs(spec, together, layers, others)})


def _are_apart(a: Peer, b: Peer) -> bool:
    return set(a.cards).isdisjoint(b.cards)


def share_of(spec: RunSpec, peers: Peers, layers: Sequence[int], holders: Sequence[str], stage: int) -> int:
    """Bytes for a stage, once all are placed: what it needs, and an equal part of what they leave on its cards. A peer
    without a stage needs nothing."""
    holder = peers.get(holders[stage])
    if holder is None:
        return 0
    others = (known for peer in holders if (known := peers.get(peer)) is not None)
    beside = [p for p in others if p is holder or not _are_apart(holder, p)]
    needed = needs(spec, beside, layers, holders)
    return needed[holder.id] + _shares(beside, needed, beside)[holder.id]


def needs(spec: RunSpec, peers: Collection[Peer], layers: Sequence[int], holders: Sequence[str]) -> Needs:
    """Of those peers that hold a stage of this cut."""
    memory, last, by_id = stage_memory(spec), len(layers) - 1, {peer.id: peer for peer in peers}
    found = {}
    for stage, (span, holder) in enumerate(zip(spans(layers), holders, strict=True)):
        if (peer := by_id.get(holder)) is not None:
            on_host = memory.on_host(span.start, span.stop) if peer.host_memory is None else 0
            found[holder] = memory.total(span.start, span.stop, last - stage, peer.computation) + on_host
    return found


def offers(peers: Collection[Peer], taken: Needs = NOTHING, whole: bool = False) -> list[Offer]:
    """Of the peers that hold nothing yet and do not rest, in the order they joined: an equal share of what is left of
    their cards, or the whole of it, which only one of them can have. A GPU's speed is shared by all, as each has
    measured it as if it were alone there; the stages on a CPU have cores of their own."""
    free = [peer for peer in peers if peer.id not in taken and peer.rest is None]
    speed = dict.fromkeys((peer.id for peer in peers), 0.0)
    for together in _by_card(peers).values():
        for peer in together:
            speed[peer.id] += 1 / _cards(peer) / (1 if peer.host_memory is None else len(together))
    memory = _all_that_is_left(peers, taken) if whole else _shares(peers, taken, free)
    return [Offer(p.id, memory[p.id], p.flops * speed[p.id], p.host_memory, p.computation, p.upload) for p in free]


def _shares(peers: Collection[Peer], taken: Needs, among: Collection[Peer]) -> dict[str, int]:
    """What is left of the cards, in bytes, divided among these peers: whoever wants less than an equal share gets that,
    and the others share the rest. A peer with several cards counts as wanting the same of each."""
    shares = dict.fromkeys((peer.id for peer in among), 0)
    for together in _by_card(peers).values():
        left = _left(together, taken)
        wanted = {p.id: max(0, (p.memory - taken.get(p.id, 0)) // _cards(p)) for p in together if p.id in shares}
        for others, peer in zip(range(len(wanted), 0, -1), sorted(wanted, key=wanted.__getitem__), strict=True):
            share = min(wanted[peer], max(0, left) // others)
            left -= share
            shares[peer] += share
    return shares


def _all_that_is_left(peers: Collection[Peer], taken: Needs) -> dict[str, int]:
    """What each peer that holds nothing would get, if it were the only one to get anything."""
    found: dict[str, int] = defaultdict(int)
    for together in _by_card(peers).values():
        left = max(0, _left(together, taken))
        for peer in together:
            found[peer.id] += min(left, peer.memory // _cards(peer))
    return found


def _fit(peers: Collection[Peer], taken: Needs) -> bool:
    return all(_left(together, taken) >= 0 for together in _by_card(peers).values())


def _left(together: Collection[Peer], taken: Needs) -> int:
    """Of one card, which these peers share."""
    whole = max(max(peer.card_memory, peer.memory) // _cards(peer) for peer in together)
    return whole - sum(-(-taken.get(peer.id, 0) // _cards(peer)) for peer in together)


def _by_card(peers: Collection[Peer]) -> dict[str, list[Peer]]:
    sharing = defaultdict(list)
    for peer in peers:
        for card in peer.cards or (peer.id,):
            sharing[card].append(peer)
    return sharing


def _cards(peer: Peer) -> int:
    return max(1, len(peer.cards))
