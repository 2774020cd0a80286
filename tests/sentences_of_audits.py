"""How audits read; rows of test_sentences.py."""

from __future__ import annotations

from protomodels_cli.coordinator import audit_notices as n
from protomodels_cli.coordinator.audit_reasons import AuditFailed, MessagesDiffer, OfAudits

LIE = AuditFailed(2, 41, "forward", 12, 2048, ("attic", "loft"))
LIED = "sent false activations from stage 2 in step 41 (12 of 2,048 numbers; recomputed by attic and loft)"
ALONE = AuditFailed(1, 41, "backward", 9, 2048, ("attic",))
SENT = "sent false gradients from stage 1 in step 41 (9 of 2,048 numbers; recomputed by attic)"
DIFFER = MessagesDiffer(41, 1)

AUDITS: list[tuple[n.AboutAudits, str]] = [
    (
        n.NobodyAudits(0.01),
        "audit = 0.01, and no peer is spare: nobody is audited until one joins that could hold a stage",
    ),
    (
        n.StageAudited(2, 41, "p2", "desk", "attic"),
        "audited stage 2 in step 41: desk sent what attic recomputed",
    ),
    (n.StageAccused("p2", "desk", ALONE), f"desk is accused: it {SENT}"),
    (
        n.AuditorsDisagree("p2", "desk", "loft", ALONE),
        "attic and loft disagree on whether desk lied in step 41; nobody is dismissed",
    ),
    *(
        (n.AuditGivenUp(2, 41, why), f"stage 2 was not audited in step 41: {text}")
        for why, text in (
            ("no_spare", "no spare is free that could hold it"),
            ("not_shown", "a neighbour did not show what it recorded"),
            ("no_verdict", "no spare came to a result"),
        )
    ),
]

FOUND: list[tuple[OfAudits, str]] = [
    (LIE, LIED),
    (ALONE, SENT),
    (DIFFER, "stages 1 and 2 report different messages of step 41"),
]
FIX = "test this machine's memory and GPU, and install the coordinator's version of pmtrain"
