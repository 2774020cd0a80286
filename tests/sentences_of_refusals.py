"""How refusals read: rows of test_sentences.py's table."""

from __future__ import annotations

from protomodels_cli.coordinator import refusals as no

AGAIN = "join again; if the same happens again, tell the run's owner"
REFUSALS: list[tuple[no.Refusal, str, str]] = [
    (no.WrongToken(), "the join token is not this run's", "ask the run's owner for a fresh join link"),
    (
        no.EndedToken("used"),
        "as many peers have joined with this token as it was made for",
        "ask the run's owner for a fresh join link",
    ),
    (no.EndedToken("expired"), "the join token has expired", "ask the run's owner for a fresh join link"),
    (
        no.EndedToken("revoked"),
        "the run's owner has revoked this join token",
        "ask the run's owner for a fresh join link",
    ),
    (no.Kicked(), "this peer was kicked by the run's owner", "ask the run's owner"),
    (
        no.TooManyJoins(0.9),
        "too many peers have joined from this network in a short time",
        "join again in 1 s",
    ),
    (no.CertificateExpired(), "this peer's certificate has expired", "join again"),
    (no.TooManyRenewals(0.9), "this peer has renewed the certificate too often", "renew it in 1 s"),
    (no.NotOwner(), "only the run's owner may do this", "run the command where the run directory is, as the owner"),
    (no.NotEnrolled(), "this peer is not enrolled in this run", "join again"),
    (no.Dismissed(), "this peer was dismissed from this run", AGAIN),
    (
        no.CoolingOff(41.2),
        "a peer from this network was dismissed for sending too many messages",
        "join again in 42 s",
    ),
    (no.TooManyCalls(), "too many calls from this address wait for an answer", "try again in a minute"),
    (
        no.OtherProtocol("0.2", 3, "0.3", 4),
        "this peer has pmtrain 0.2 (protocol 3), the coordinator 0.3 (protocol 4)",
        "install pmtrain 0.3 here",
    ),
    (
        no.TooManyPeers(10_000),
        "10,000 peers are in this run already",
        "join again when some have left",
    ),
    (no.InvalidKey("not a key", "0.3"), "this peer's key cannot be signed: not a key", "install pmtrain 0.3 here"),
    (no.NoSuchPeer("desk", 0), "the run has no peer 'desk'", "name a peer as `pmtrain peers` shows it"),
    (
        no.NoSuchPeer("desk", 2),
        "2 peers are called 'desk'",
        "name the id instead, as `pmtrain peers` shows it",
    ),
    (no.RestsByItself("desk"), "desk was put to rest on desk's own machine", "run `pmtrain wake` on desk's machine"),
    (no.NoSuchToken("a1"), "the run has no token 'a1'", "name a token as `pmtrain token list` shows it"),
    (no.TooManyTokens(1000), "1,000 tokens of this run let peers join already", "revoke some that are not needed"),
    (no.NoSession(), "parts of snapshots go only to peers with an open session", "open a session first"),
    (
        no.PartNotAssigned(1, 6),
        "stage 1's part of the snapshot at step 6 goes only to peers that were told to hold, build, audit or prefetch "
        "that stage",
        "wait until the coordinator assigns the stage to this peer",
    ),
    (
        no.AuditNotAsked(7),
        "the messages of audit 7 go only to the spare that was asked for it",
        "wait until the coordinator asks this peer for an audit",
    ),
    (no.OtherSpec(), "this peer's spec is not the run's (hash mismatch)", "join again with this run's link"),
]
