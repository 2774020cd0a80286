"""What peers bring where several of them share a card or a machine. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from protomodels_cli.coordinator.placement import Offer
from protomodels_cli.coordinator.state import Peer


def offers(peers: Iterable[Peer]) -> list[Offer]:
    """In the order they joined. A card's memory is counted once: whoever wants less than an equal share of it gets
    that, and the others share the rest. So is a GPU's speed, which each has measured as if it were alone there; the
    stages on a CPU have cores of their own."""
    found, sharing = {}, defaultdict(list)
    for peer in peers:
        found[peer.id] = Offer(peer.id, peer.memory, peer.flops, peer.host_memory, peer.path)
        sharing[peer.card or peer.id].append(peer)
    for together in sharing.values():
        left = max(max(peer.card_memory, peer.memory) for peer in together)
        for others, peer in zip(range(len(together), 0, -1), sorted(together, key=lambda p: p.memory), strict=True):
            memory = min(peer.memory, left // others)
            left -= memory
            flops = peer.flops if peer.host_memory is None else peer.flops / len(together)
            found[peer.id] = Offer(peer.id, memory, flops, peer.host_memory, peer.path)
    return list(found.values())
