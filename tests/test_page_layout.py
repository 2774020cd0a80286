"""The page in Chromium at several widths: nothing is cut off or lies over anything else, whatever the labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium
from test_page import page_at
from tiers import table

from protomodels_cli.observe.page.address import default_place
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

PATHS = ("loopback", "relay 203.0.113.77:7430", "punched", "public", "lan", "door")
NAMES = (
    "desk",
    "a-rather-long-name-for-a-machine-in-the-attic",
    "Großvaters alter Rechner",
    "gpu-box-0042.example.org",
)
DEVICE = "NVIDIA GeForce RTX 4090 Laptop GPU, 2 of them in one machine"

# Texts outside of the box that they belong to or of the window, boxes with more in them than they show, and texts that
# lie over each other.
CUT_OFF = """
(() => {
  const bad = [], boxes = ".stage, .between, .tile, .card, header, footer, main";
  const seen = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const wide = document.documentElement.clientWidth;
  let texts = 0;
  while (seen.nextNode()) {
    const e = seen.currentNode.parentElement;
    if (!seen.currentNode.textContent.trim() || !e.getClientRects().length) continue;
    if (e.closest("noscript, .skip, svg")) continue;
    texts++;
    const range = document.createRange();
    range.selectNodeContents(seen.currentNode);
    const text = range.getBoundingClientRect(), box = e.closest(boxes).getBoundingClientRect();
    const inside = text.left >= box.left - 0.5 && text.right <= box.right + 0.5 && text.bottom <= box.bottom + 0.5;
    if (text.left < -0.5 || text.right > wide + 0.5 || (!inside && !e.closest("#events, #work")))
      bad.push(`outside ${e.closest(boxes).className}: ${seen.currentNode.textContent}`);
  }
  for (const e of document.querySelectorAll("body, main, main *")) {
    if (e.closest("svg") || !e.getClientRects().length || getComputedStyle(e).display === "inline") continue;
    if (e.scrollWidth > e.clientWidth + 1)
      bad.push(`${e.tagName} ${e.className || e.id} ${e.scrollWidth} > ${e.clientWidth}`);
  }
  for (const row of document.querySelectorAll(".percent, .stage .top, .stage dl, #work tr")) {
    const boxes = [...row.children].map((e) => {
      const range = document.createRange();
      range.selectNodeContents(e);
      return [range.getBoundingClientRect(), e];
    });
    boxes.forEach(([a, x], i) => boxes.slice(i + 1).forEach(([b, y]) => {
      const apart = a.left >= b.right + 3 || b.left >= a.right + 3 || a.top >= b.bottom - 1 || b.top >= a.bottom - 1;
      if (!apart)
        bad.push(`${x.textContent} lies over ${y.textContent}`);
    }));
  }
  return { texts, bad };
})()
"""


def a_status(stages: int) -> pb.RunStatus:
    """All labels, long names, a stage that nobody holds, and many who did something."""
    found = pb.RunStatus(name="a run with a name of some length", phase=pb.RunStatus.RUNNING, step=1466, steps=2_500)
    found.tokens, found.tokens_total, found.tokens_per_s, found.eta_s = 12_345_678, 98_765_432, 12_345.6, 4000.0
    found.loss, found.eval_loss, found.uptime_s, found.started, found.no_spare = 3.75, 3.8123, 3900.0, 1.0, True
    found.crash_redo_s, found.crash_restore_s, found.snapshot_step = 91.0, 12.0, 1450
    for i in range(stages):
        name, lost = NAMES[i % len(NAMES)], i == stages - 2
        stage = found.stages.add(stage=i, first_layer=12 * i, end_layer=12 * i + 12, state=pb.StageStatus.TRAINING)
        stage.holders.add(peer=f"p{i:08x}", name=name, presence=pb.KICKED if lost else pb.HERE)
        if lost:
            stage.state = pb.StageStatus.LOST
        else:
            found.peers.add(peer=f"p{i:08x}", name=name, device=DEVICE, state=pb.PeerStatus.HOLDING, stage=i)
            stage.compute_share, stage.wait_share, stage.wire_share = ((1.0, 0, 0), (0.39, 0.56, 0.05))[i % 2]
            stage.peak_memory, stage.forecast_memory, stage.process_memory = 1023 << 20, 999 << 20, bool(i % 2)
            stage.celsius, stage.watts = 71.4, 349.6
        if i + 1 < stages:
            stage.path, stage.round_trip_s, stage.path_why = PATHS[i % len(PATHS)], 0.000902, "neither is let in"
        stage.forward_bytes_per_token = stage.backward_bytes_per_token = 1023.4
    for i, name in enumerate((*NAMES, "x" * 64, *(f"n{i}" for i in range(30)))):
        found.contributions.add(name=name, steps=12_345 - i, tokens=1, seconds=1e6, sent_bytes=1023 << 30)
    for name, how in zip(NAMES, (pb.LEFT, pb.KICKED, pb.LOST, pb.AWAY), strict=True):
        found.gone.add(peer="p", name=name, how=how, gone_s=4000.0)
    return found


class Served:
    """A page, and what it is to show."""

    def __init__(self, folder: Path):
        self.place, self.status = default_place(), a_status(4)
        rows = [
            {"event": "step", "step": i, "loss": 4.0 - i / 900, "tokens": 64, "seconds": 0.5} for i in range(1, 901)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        told = [{"kind": "no_spare_left", "at": 1.0, "text": "word " * 40 + "x" * 90}] * 3
        (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("page")
    found = Served(folder)
    with page_at(found.place, folder, lambda: found.status):
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def opened(browser: Browser, served: Served, stages: int, width: int) -> Any:
    served.status = a_status(stages)
    browser.open(f"http://127.0.0.1:{served.place.port}/", width=width)
    browser.wait(f"document.querySelectorAll('.stage').length === {stages} && curves.loss.size > 1")
    browser.look("document.getElementById('join-line').textContent = 'pmtrain join pm://' + 'x'.repeat(120)")
    browser.look("document.getElementById('join').hidden = false")
    return browser.look(CUT_OFF)


@pytest.mark.parametrize(
    ("stages", "width"), table([(stages, width) for stages in (4, 12) for width in (1280, 360, 1440)])
)
def test_nothing_is_cut_off_or_lies_over_anything_else(browser, served, stages, width):
    found = opened(browser, served, stages, width)
    assert found["texts"] > 100
    assert found["bad"] == []


def test_what_a_viewer_can_ask_for_and_what_a_smoothed_loss_is(browser, served):
    opened(browser, served, 4, 1280)
    said = browser.look("document.querySelector('#loss output').textContent")
    assert "(mean of 3 steps)" in said or "(mean of 4 steps)" in said or "(mean of 2 steps)" in said
    explained = "[...document.querySelectorAll('[title]:not([title=\"\"])')].map((e) => e.textContent.trim())"
    found = " ".join(browser.look(explained))
    for word in ("compute", "wait", "wire", "process", "stage needs", "generation", "lineage", "A crash now"):
        assert word in found, word
    assert browser.look("document.querySelectorAll('#work>table>tbody>tr').length") == 21, (
        "the first, and how many more"
    )
    left = browser.look("document.querySelector('#eta').textContent")
    assert left.startswith("1 h 00 min ")  # since the start
    assert "86.4M tokens" in left
    assert "71 °C, 350 W" in browser.look("document.querySelector('.stage').textContent")
    vacant = browser.look("document.querySelector('.stage[data-state=lost]').textContent")
    assert "kicked" in vacant
    assert NAMES[2] in vacant
    assert "%" not in vacant
    assert browser.look("[...document.querySelectorAll('#gone .chip')].length") == 4
    served.status.phase, served.status.tokens_per_s = pb.RunStatus.WAITING, 0.0
    browser.wait("document.body.dataset.phase === 'waiting'")
    assert browser.look("document.querySelectorAll('.tile .value')[2].textContent") == "–"
