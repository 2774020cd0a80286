"""How refusals read: the one place where refusals.py becomes English."""

from __future__ import annotations

import math
from typing import assert_never

from protomodels_cli.coordinator import refusals as no
from protomodels_cli.quantities import duration, plural


def refusal(reason: no.Refusal) -> tuple[str, str]:
    """What a caller reads that is not let in: why, and what to do."""
    fresh = "ask the run's owner for a fresh join link"
    match reason:
        case no.WrongToken():
            return "the join token is not this run's", fresh
        case no.NotOwner():
            return "only the run's owner may do this", "run the command where the run directory is, as the owner"
        case no.NotEnrolled():
            return "this peer is not enrolled in this run", "join again"
        case no.CertificateExpired():
            return "this peer's certificate has expired", "join again"
        case no.TooManyRenewals(seconds):
            wait = f"renew it in {duration(math.ceil(seconds))}"
            return "this peer has renewed the certificate too often", wait
        case no.EndedToken(how):
            what = {
                "used": "as many peers have joined with this token as it was made for",
                "expired": "the join token has expired",
                "revoked": "the run's owner has revoked this join token",
            }
            return what[how], fresh
        case no.Kicked():
            return "this peer was kicked by the run's owner", "ask the run's owner"
        case no.Dismissed():
            return (
                "this peer was dismissed from this run",
                "join again; if the same happens again, tell the run's owner",
            )
        case no.CoolingOff(seconds):
            wait = f"join again in {duration(math.ceil(seconds))}"
            return "a peer from this network was dismissed for sending too many messages", wait
        case no.TooManyJoins(seconds):
            wait = f"join again in {duration(math.ceil(seconds))}"
            return "too many peers have joined from this network in a short time", wait
        case no.TooManyCalls():
            return "too many calls from this address wait for an answer", "try again in a minute"
        case no.OtherProtocol(version, protocol, our_version, our_protocol):
            theirs, ours = f"{version} (protocol {protocol})", f"{our_version} (protocol {our_protocol})"
            return f"this peer has pmtrain {theirs}, the coordinator {ours}", f"install pmtrain {our_version} here"
        case no.TooManyPeers(most):
            return (
                f"{plural(most, 'peer')} are in this run already",
                "join again when some have left",
            )
        case no.InvalidKey(detail, our_version):
            return f"this peer's key cannot be signed: {detail}", f"install pmtrain {our_version} here"
        case no.OtherSpec():
            return "this peer's spec is not the run's (hash mismatch)", "join again with this run's link"
        case no.NoSession():
            return "parts of snapshots go only to peers with an open session", "open a session first"
        case no.PartNotAssigned(stage, step):
            rule = "goes only to peers that were told to hold, build, audit or prefetch that stage"
            fix = "wait until the coordinator assigns the stage to this peer"
            return f"stage {stage}'s part of the snapshot at step {step} {rule}", fix
        case no.AuditNotAsked(audit):
            fix = "wait until the coordinator asks this peer for an audit"
            return f"the messages of audit {audit} go only to the spare that was asked for it", fix
        case no.NoSuchPeer(name, 0):
            return f"the run has no peer {name!r}", "name a peer as `pmtrain peers` shows it"
        case no.NoSuchPeer(name, peers):
            return f"{peers} peers are called {name!r}", "name the id instead, as `pmtrain peers` shows it"
        case no.RestsByItself(name):
            return f"{name} was put to rest on {name}'s own machine", f"run `pmtrain wake` on {name}'s machine"
        case no.NoSuchToken(id):
            return f"the run has no token {id!r}", "name a token as `pmtrain token list` shows it"
        case no.TooManyTokens(most):
            return f"{most:,} tokens of this run let peers join already", "revoke some that are not needed"
        case _:
            assert_never(reason)
