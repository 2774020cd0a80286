"""How audits read; rows of test_sentences.py."""

from __future__ import annotations

from protomodels_cli.coordinator import audit_notices as n
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts, MessagesDiffer, OfAudits

LIE = AuditFailed(2, 41, "forward", 12, 2048, ("attic", "loft"))
LIED = "sent false activations from stage 2 in step 41 (12 of 2,048 numbers; recomputed by attic and loft)"
ALONE = AuditFailed(1, 41, "backward", 9, 2048, ("attic",))
SENT = "sent false gradients from stage 1 in step 41 (9 of 2,048 numbers; recomputed by attic)"
FALSE, CONTRADICTED = FalseVerdicts(2, 4), "gave results of audits that 2 of 4 people contradict"
DIFFER = MessagesDiffer(41, 1)

AUDITS: list[tuple[n.AboutAudits, str]] = [
    (
        n.NobodyAudits(0.01, "no_spare"),
        "audit = 0.01, and no peer is spare: nobody is audited until one joins that could hold a stage",
    ),
    (
        n.NobodyAudits(0.01, "no_independent"),
        "audit = 0.01, and every spare shares the holders' token or address, so nobody is audited; give each person a "
        "token: `pmtrain token create --for NAME`",
    ),
    (
        n.StageAudited(2, 41, "p2", "desk", "attic"),
        "audited stage 2 in step 41: desk sent what attic recomputed",
    ),
    (n.StageAccused("p2", "desk", ALONE), f"desk is accused: it {SENT}"),
    (
        n.AuditorsDisagree("p2", "desk", "loft", ALONE),
        "attic and loft disagree on whether desk lied in step 41; others are asked",
    ),
    (
        n.HolderWatched("p2", "desk", ALONE, 1, 2),
        f"desk is watched: it {SENT}; 1 of 2 people who must contradict it before it is dismissed do; `pmtrain kick "
        "desk` dismisses it now",
    ),
    *(
        (n.AuditGivenUp(2, 41, why), f"stage 2 was not audited in step 41: {text}")
        for why, text in (
            ("no_spare", "no spare could hold it"),
            (
                "no_independent",
                "every spare that could hold it shares the holder's token or address, or has lied",
            ),
            ("spares_busy", "all spares that could hold it are building a stage or leaving"),
            ("not_shown", "a neighbour did not show what it recorded"),
            ("no_verdict", "no spare came to a result"),
        )
    ),
]

FOUND: list[tuple[OfAudits, str]] = [
    (LIE, LIED),
    (ALONE, SENT),
    (FALSE, CONTRADICTED),
    (DIFFER, "stages 1 and 2 report different messages of step 41"),
]
FIX = "test this machine's memory and GPU, and install the coordinator's version of pmtrain"
