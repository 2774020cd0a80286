"""What is said of links that are not direct, and why."""

from __future__ import annotations

from typing import get_args

import pytest
from wording import check_wording

from protomodels_cli.coordinator import path_reasons as paths
from protomodels_cli.coordinator.sentences import not_direct
from protomodels_cli.observe.punches import not_punched
from protomodels_cli.observe.view import why_not_direct
from protomodels_cli.wire.path import NotPunched, told
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

NEITHER = "neither router lets connections in"


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (paths.NobodyLetIn(0), NEITHER),
        (paths.NoDirectAnswer(0), "no answer at any address that one of them has for the other"),
        (
            paths.NobodyLetIn(1, "port_changes_there"),
            f"{NEITHER}; the router of stage 2 gives every connection another port",
        ),
        (
            paths.NobodyLetIn(1, "not_opened"),
            f"{NEITHER}; both ends have tried to connect at the same moment, and nothing came through",
        ),
        (paths.NobodyLetIn(1, "no_answer"), f"{NEITHER}; stage 2 did not say in time where it is seen"),
        (paths.NobodyLetIn(1, "not_listening_here"), f"{NEITHER}; stage 1 is not to be dialled (--no-listen)"),
        (paths.Punched(), f"{NEITHER}, so both ends connected at the same moment"),
    ],
)
def test_why_a_link_is_not_direct(why: paths.NotDirect, text: str):
    assert not_direct(why) == text


@pytest.mark.parametrize("why", sorted({told(why, here) for why in get_args(NotPunched) for here in (True, False)}))
def test_every_reason_has_words_that_stand_on_their_own(why: str):
    check_wording(not_punched(why, "desk", "attic"))


def test_each_way_and_reason_is_said_once_with_its_stages():
    links = [("door", "A"), ("punched", "B"), ("relay r:1", "A"), ("lan", "")]
    stages = [pb.StageStatus(stage=i, path=path, path_why=why) for i, (path, why) in enumerate(links)]
    assert why_not_direct(pb.RunStatus(stages=stages)) == [
        "relayed between stages 0–1, 2–3: A",
        "punched between stages 1–2: B",
    ]
