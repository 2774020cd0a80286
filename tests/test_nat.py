"""Runs across real NATs: which path each link takes, and what a move and an idle router cost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_hosts import needs

from protomodels_cli.bench import wanlab
from protomodels_cli.errors import EXIT_SPEC
from protomodels_cli.launch.nat import require
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.paths import PARDON, SHORT_LIFE, Trust, direct_tries, tries

pytestmark = pytest.mark.waiting

needs_routers = needs(require)
DOOR = "203.0.113.1", 7420


def lab(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert wanlab.main(["nat", *words]) == 0
    return dict(json.loads(capfd.readouterr().out))


@needs_routers
def test_a_lan_is_direct_and_whoever_is_carried_elsewhere_goes_on_without_it(capfd):
    found = lab(
        capfd, "--peers", "lan_1,lan_2", "--steps", "30", "--at-once", "--idle", "5", "--move", "lan_2:router_a"
    )
    assert (found["generations"], found["steps"], found["steps_redone"]) == (1, 30, 0)
    assert found["paths_before"] == ["lan"]
    [boundary] = found["boundaries"]
    assert boundary["path"] in ("door", "punched"), "after the move they share no router"
    assert 0 < boundary["path_s"] < 15


@needs_routers
@pytest.mark.parametrize("internet", [["--idle", "5"], ["--ipv6"]], ids=["ipv4", "ipv6"])
def test_two_homes_are_relayed_then_punched_and_nothing_is_done_again(capfd, internet):
    found = lab(capfd, "--peers", "home_a,home_b", "--steps", "150", "--at-once", *internet)
    assert (found["generations"], found["steps"], found["steps_redone"]) == (1, 150, 0)
    [boundary] = found["boundaries"]
    assert boundary["path"] == "punched"
    [carried] = found["relayed_bytes_door"]
    assert carried["forward"] > 0, "it was relayed first"
    assert boundary["step_s_relayed"] > 0


@needs_routers
def test_behind_routers_that_change_ports_a_link_stays_relayed_and_says_why(capfd):
    words = "--symmetric", "--relays", "2", "--steps", "80", "--at-once"
    found = lab(capfd, "--peers", "home_a,home_b", *words)
    assert (found["generations"], found["steps_redone"]) == (1, 0)
    [boundary] = found["boundaries"]
    assert boundary["path"].startswith("relay ")
    assert boundary["not_punched"].startswith("port_changes_")


@needs_routers
def test_bad_words_are_refused(capsys):
    assert wanlab.main(["nat", "--peers", "attic,home_a"]) == EXIT_SPEC
    assert "attic" in capsys.readouterr().err


def a_route(**how: Any) -> pb.Route:
    candidates = [pb.Candidate(host=f"h{i}", port=1, kind="lan") for i in range(2)]
    relays = [pb.Relay(host="r", port=2, ticket="t1"), pb.Relay(host="2001:db8::1", port=3, ticket="t2")]
    return pb.Route(candidates=candidates, relays=relays, ticket="t3", **how)


def test_addresses_come_first_then_relays_by_distance_then_the_door():
    found = list(tries(a_route(), DOOR, trusted=True))
    assert [t.path for t in found] == ["lan", "lan", "relay r:2", "relay [2001:db8::1]:3", "door"]
    assert [t.ticket for t in found[2:]] == ["t1", "t2", "t3"]
    delays = [t.delay for t in found]
    assert delays == sorted(delays)
    assert delays[1] < 1 < delays[2], "who answers directly is heard before a relay is asked"
    assert delays[-1] < 10, "within about ten seconds it is relayed, and by nobody but the coordinator if need be"


def test_without_hope_or_trust_relays_are_asked_at_once():
    for route, trusted in ((a_route(unlikely=True), True), (a_route(), False)):
        relays = [t for t in tries(route, DOOR, trusted) if t.ticket]
        assert relays[0].delay == 0
    assert not [t for t in tries(a_route(), DOOR, trusted=False) if not t.ticket]
    assert [t.place for t in direct_tries(a_route())] == [("h0", 1), ("h1", 1)]


def test_a_direct_path_that_breaks_soon_twice_is_left_alone_for_longer_each_time():
    trust = Trust()
    trust.broke(SHORT_LIFE / 2, 100.0)
    assert trust.holds(100.0), "once may happen"
    trust.broke(SHORT_LIFE / 2, 110.0)
    assert not trust.holds(110.0 + PARDON - 1)
    assert trust.holds(110.0 + PARDON)
    trust.broke(1.0, 200.0)
    assert not trust.holds(200.0 + 2 * PARDON - 1)
    trust.broke(10 * SHORT_LIFE, 1000.0)
    trust.broke(1.0, 1001.0)
    assert trust.holds(1001.0), "one that lived long has earned it again"
