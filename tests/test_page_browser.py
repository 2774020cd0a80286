"""The page in a real Chromium, beside a real run: what a viewer sees of a killed peer, of a coordinator that goes away,
and of the end; that it fits a telephone; that its text can be read, and used without a mouse."""

from __future__ import annotations

import os

import pytest
from browser import Browser, chromium
from conftest import make_spec
from starting import begin
from test_page import page_of
from test_run import coordinator, ends
from told import events
from waiting import wait_for

# Every text that is seen, with its contrast against what is behind it (WCAG 2: 4.5, for large text 3).
CONTRAST = """
(() => {
  const rgb = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = (c) => {
    const [r, g, b] = c.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = [], seen = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (seen.nextNode()) {
    const e = seen.currentNode.parentElement, style = getComputedStyle(e);
    if (!seen.currentNode.textContent.trim() || !e.getClientRects().length || e.closest("noscript, .skip")) continue;
    texts++;
    let behind = null;
    for (let up = e; up && !behind; up = up.parentElement) {
      const c = rgb(getComputedStyle(up).backgroundColor);
      if (c[3] === 1) behind = c;
    }
    const front = rgb(e instanceof SVGElement ? style.fill : style.color);
    const [high, low] = [light(front.slice(0, 3)), light(behind.slice(0, 3))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) bad.push(`${seen.currentNode.textContent} ${ratio.toFixed(2)}`);
  }
  return { texts, bad };
})()
"""
LIVE = "document.body.dataset.link === 'live'"
STATES = "[...document.querySelectorAll('.stage')].map((s) => s.dataset.state)"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def tab(browser: Browser) -> str:
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    return browser.look("document.activeElement.id || document.activeElement.tagName")


def test_what_a_viewer_sees_of_a_run(browser, tmp_path):
    """A peer is killed and replaced, the coordinator is killed and comes back, the run ends."""
    spec = make_spec(
        stages=2,
        steps=100_000,
        limits={"lease_seconds": 2.0},
        snapshots={"interval": 20},
        eval={"interval": 10},
    )
    with coordinator(spec, tmp_path) as (leader, link):
        joining = ("join", link, "--device", "cpu", "--name")
        peers = [begin(*joining, f"n{i}", "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        browser.open((tmp_path / "run" / "page").read_text().strip())
        assert browser.look("location.search") == "", "the key is in a cookie"
        browser.wait(f"{LIVE} && document.body.dataset.phase === 'running'")
        browser.wait("curves.loss.size > 5 && curves.held_out.size > 0")
        assert browser.look("document.getElementById('join-line').textContent").endswith(f"'{link}'")
        assert browser.look(STATES).count("lost") == 0
        browser.wait("/\\d ms$/.test(document.querySelector('.between .kind').textContent)")  # the link's round trip
        checks(browser, page_of(tmp_path))

        peers[0].kill()
        browser.wait(f"{STATES}.includes('lost')", 15)
        browser.wait("document.querySelector('#events li.grave[data-kind=peer_lost]') !== null", 15)
        assert browser.look("document.body.dataset.phase") == "waiting"
        assert not browser.look("document.getElementById('banner').hidden")
        assert browser.look(CONTRAST)["bad"] == []
        peers[0] = begin(*joining, "again", "--dir", tmp_path / "p2", cwd=tmp_path)
        browser.wait("document.body.dataset.phase === 'running'")

        before = browser.look("state.step")
        leader.kill()
        browser.wait("document.body.dataset.link === 'gone'", 15)
        assert browser.look("document.getElementById('banner').classList.contains('bad')")
        again = begin(
            *("coordinator", "--resume", "--run-dir", "run", "--host", "127.0.0.1", "--page", page_of(tmp_path)),
            cwd=tmp_path,
        )
        try:
            browser.wait(f"{LIVE} && state.step > {before}")
            os.kill(again.pid, 2)
            browser.wait("document.body.dataset.link === 'ended' && state.ended === 'stopped'", 15)
        finally:
            again.kill()
            for process in (*peers, again):
                process.kill()


def checks(browser: Browser, place: str) -> None:
    """Contrast in both schemes, a telephone's width, the keyboard."""
    for dark in (False, True):
        browser.open(f"http://{place}/", dark=dark)
        browser.wait(f"{LIVE} && document.querySelectorAll('.stage').length === 2")
        found = browser.look(CONTRAST)
        assert found["texts"] > 50
        assert found["bad"] == []
    reached = [tab(browser) for _ in range(12)]
    assert {"join-line", "copy", "stages", "grave", "events"} <= set(reached)
    assert browser.look("getComputedStyle(document.activeElement).outlineStyle") != "none"
    browser.open(f"http://{place}/", width=360)
    browser.wait(f"{LIVE} && document.querySelectorAll('.stage').length === 2")
    assert browser.look("document.documentElement.scrollWidth") <= 360
    loaded = browser.look(
        "performance.getEntriesByType('resource').filter((r) => !r.name.endsWith('/events'))"
        ".reduce((sum, r) => sum + r.encodedBodySize, 0)"
    )
    assert 10_000 < loaded < 100_000
    assert browser.look("performance.getEntriesByType('resource').every((r) => new URL(r.name).host === location.host)")


def test_a_finished_run_says_so(browser, tmp_path):
    spec = make_spec(stages=2, steps=60, eval={"interval": 20})
    with coordinator(spec, tmp_path) as (leader, link):
        browser.open(f"http://{page_of(tmp_path)}/")
        browser.wait(f"{LIVE} && document.body.dataset.phase === 'waiting_for_peers'")
        peers = [begin("join", link, "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        browser.wait("document.body.dataset.phase === 'done' && document.body.dataset.link === 'ended'", 120)
        browser.look("clearInterval(looking)")  # another test's coordinator may have this port next
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
    assert browser.look("document.getElementById('banner').className") == "good"
    assert browser.look("document.getElementById('join').hidden"), "nobody has shown the owner's key"
    assert browser.look("state.step") == 60
    elsewhere = "JSON.stringify({state: {...state, run: 'x', name: 'attic', step: 12}, curves: {}, events: []})"
    browser.look(f"source.onmessage({{data: {elsewhere}}})")
    assert browser.look("state.step") == 60, "what is at this address now is not taken for this run"
    assert browser.look("document.getElementById('banner').textContent.includes('attic')")
    told = wait_for(lambda: events(tmp_path / "run", "run_done"), "it was not told")
    assert len(told) == 1
