"""`join --power`: a card's limit is set and set back, by a program in place of NVIDIA's, or it is said why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import wait_for

from protomodels_cli.worker import notices as n
from protomodels_cli.worker.figures import Figures
from protomodels_cli.worker.power import limited, warmth, watched

CARD = "GPU-0b1c"
# It keeps its one limit in a file, and takes a new one unless that is read-only.
TOOL = """#!/bin/sh
limit=$(dirname "$0")/limit
[ "$1" = -i ] && [ "$2" = GPU-0b1c ] || { echo "No devices were found"; exit 6; }
case "$3" in
-pl) [ -e "$(dirname "$0")/forbidden" ] && { echo "Insufficient Permissions"; exit 4; }; echo "$4" > "$limit";;
--query-gpu=temperature.gpu*) echo "61, 187.5";;
*) echo "$(cat "$limit"), 100.00, 350.00";;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(TOOL)
    program.chmod(0o755)
    (tmp_path / "limit").write_text("320\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def limit(tool: Path) -> str:
    return (tool / "limit").read_text().strip()


def test_a_limit_lasts_as_long_as_the_peer(tool: Path):
    told: list[n.Notice] = []

    def fail() -> None:
        with limited([CARD], 200.0, told.append):
            assert limit(tool) == "200"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert limit(tool) == "320"
    assert told == [n.PowerLimited(200.0)]


@pytest.mark.parametrize(
    ("cards", "watts", "missing", "why"),
    [
        ([CARD], 90.0, "", "100"),
        ([CARD], 400.0, "", "350"),
        ([], 200.0, "", "card"),
        (["GPU-other"], 200.0, "", "No devices"),
        ([CARD], 200.0, "forbidden", "Permissions"),
        ([CARD], 200.0, "tool", "nvidia-smi"),
    ],
)
def test_where_it_cannot_be_set_that_is_said_and_the_peer_goes_on(tool: Path, cards, watts, missing, why):
    told: list[n.Notice] = []
    if missing == "forbidden":
        (tool / "forbidden").touch()
    if missing == "tool":
        (tool / "nvidia-smi").unlink()
    with limited(cards, watts, told.append):
        assert limit(tool) == "320"
    [said] = told
    assert isinstance(said, n.PowerNotLimited)
    assert why in said.detail
    assert limit(tool) == "320"


def test_a_limit_that_cannot_be_set_back_is_told(tool: Path):
    told: list[n.Notice] = []
    with limited([CARD], 200.0, told.append):
        (tool / "forbidden").touch()
    assert [type(notice) for notice in told] == [n.PowerLimited, n.PowerNotRestored]


def test_without_the_option_nothing_is_touched_or_said(tool: Path):
    with limited([CARD], None, lambda notice: pytest.fail(str(notice))):
        assert limit(tool) == "320"


def test_temperature_and_power_are_among_the_figures(tool: Path):
    assert warmth(CARD) == (61.0, 187.5)
    assert warmth("GPU-other") is None
    figures = Figures()
    with watched(CARD, figures):
        wait_for(lambda: figures.warmth)
    shown = {family.name: family.samples[0].value for family in figures.collect() if "card" in family.name}
    assert shown == {"pmtrain_peer_card_celsius": 61.0, "pmtrain_peer_card_watts": 187.5}
