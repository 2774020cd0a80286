"""A headless Chromium for tests, driven over its DevTools protocol. Needs no package beside aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waiting import wait_for

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


class Browser:
    """One tab. `look` evaluates an expression of the page's."""

    def __init__(self, address: str):
        self._loop, self._count = asyncio.new_event_loop(), 0
        [tab, *_] = [t for t in self._get(f"http://{address}/json/list") if t["type"] == "page"]
        self._session = self._loop.run_until_complete(self._begin(tab["webSocketDebuggerUrl"]))

    def _get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    async def _begin(self, url: str) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession()
        self._socket = await session.ws_connect(url, max_msg_size=0)
        return session

    def call(self, method: str, **params: Any) -> Any:
        async def ask() -> Any:
            self._count += 1
            await self._socket.send_json({"id": self._count, "method": method, "params": params})
            async with asyncio.timeout(60):
                while True:
                    answer = await self._socket.receive_json()
                    if answer.get("id") == self._count:
                        assert "error" not in answer, answer
                        return answer["result"]

        return self._loop.run_until_complete(ask())

    def look(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        return wait_for(lambda: self.look(expression), f"{expression} did not come", seconds, self._what_it_shows)

    def _what_it_shows(self) -> str:
        return str(self.look("JSON.stringify(document.body.dataset) + document.body.innerText.slice(0, 400)"))

    def open(self, url: str, width: int = 1280, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol === 'http:'")

    def close(self) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [program, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, start_new_session=True, **quiet)
        try:
            said = Path(folder) / "DevToolsActivePort"
            wait_for(lambda: said.exists() and said.read_text().count("\n"), "Chromium did not start")
            browser = Browser(f"127.0.0.1:{said.read_text().splitlines()[0]}")
            yield browser
            browser.close()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
