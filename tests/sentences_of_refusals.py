"""How refusals read: rows of test_sentences.py's table."""

from __future__ import annotations

from protomodels_cli.coordinator import refusals as no

AGAIN = "join again; if the same happens again, tell the run's owner"
REFUSALS: list[tuple[no.Refusal, str, str]] = [
    (no.WrongToken(), "the join token is not this run's", "ask the run's owner for a fresh join link"),
    (no.NotOwner(), "only the run's owner may do this", "run the command where the run directory is, as the owner"),
    (no.NotEnrolled(), "this peer is not enrolled in this run", "join again"),
    (no.Dismissed(), "this peer was dismissed from this run", AGAIN),
    (
        no.CoolingOff(41.2),
        "a peer from this network was dismissed for sending too many messages",
        "join again in 42 s",
    ),
    (
        no.OtherProtocol("0.2", 3, "0.3", 4),
        "this peer has pmtrain 0.2 (protocol 3), the coordinator 0.3 (protocol 4)",
        "install pmtrain 0.3 here",
    ),
    (
        no.TooManyPeers(10_000),
        "10,000 peers have joined this run already",
        "ask the run's owner to restart the coordinator",
    ),
    (no.InvalidKey("not a key", "0.3"), "this peer's key cannot be signed: not a key", "install pmtrain 0.3 here"),
    (no.OtherSpec(), "this peer's spec is not the run's (hash mismatch)", "join again with this run's link"),
]
