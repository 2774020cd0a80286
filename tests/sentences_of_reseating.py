"""How it reads that a stage is given to a faster spare; rows of test_sentences.py."""

from __future__ import annotations

from protomodels_cli.coordinator import reasons as r
from protomodels_cli.coordinator import reseat_notices as n

WHY = r.Reseating(2, "attic", "desk", 160.0, 40.0)
RESEATING = (WHY, "stage 2 to be re-seated from attic to desk: steps should take 40 s instead of 2 min 40 s")
STAYS = "stage 2 stays with attic: {}; nothing is redone"

RESEATINGS: list[tuple[n.AboutReseating, str]] = [
    (
        n.StageReseating(40, 780.0, WHY),
        "re-seating stage 2 from attic to desk: steps should take 40 s instead of 2 min 40 s; the run pauses after "
        "step 40 for about 13 min",
    ),
    (
        n.StageReseated(2, "p4", "desk", "p2", "attic"),
        "re-seated stage 2 from attic to desk; attic is a spare now",
    ),
    *(
        (n.StageNotReseated(2, "p2", "attic", "p4", "desk", why), STAYS.format(text))
        for why, text in (
            ("spare_gone", "desk is gone"),
            ("spare_needed", "desk is needed for another stage"),
            ("not_ready", "desk did not build the stage in time"),
            ("not_saved", "the snapshot was not saved in time"),
        )
    ),
]
