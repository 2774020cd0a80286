"""What peers bring where several of them share a card or a machine. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from protomodels_cli.coordinator.placement import Offer
from protomodels_cli.coordinator.state import Peer


def offers(peers: Collection[Peer]) -> list[Offer]:
    """In the order they joined. A card's memory is counted once: whoever wants less than an equal share of it gets
    that, and the others share the rest. So is a GPU's speed, which each has measured as if it were alone there; the
    stages on a CPU have cores of their own. A peer with several cards counts as wanting the same of each."""
    sharing = defaultdict(list)
    for peer in peers:
        for card in peer.cards or (peer.id,):
            sharing[card].append(peer)
    memory, speed = dict.fromkeys((peer.id for peer in peers), 0), dict.fromkeys((peer.id for peer in peers), 0.0)
    for together in sharing.values():
        wanted = {peer.id: peer.memory // _cards(peer) for peer in together}
        left = max(max(peer.card_memory // _cards(peer), wanted[peer.id]) for peer in together)
        for others, peer in zip(range(len(together), 0, -1), sorted(together, key=lambda p: wanted[p.id]), strict=True):
            share = min(wanted[peer.id], left // others)
            left -= share
            memory[peer.id] += share
            speed[peer.id] += 1 / _cards(peer) / (1 if peer.host_memory is None else len(together))
    return [Offer(p.id, memory[p.id], p.flops * speed[p.id], p.host_memory, p.path) for p in peers]


def _cards(peer: Peer) -> int:
    return max(1, len(peer.cards))
