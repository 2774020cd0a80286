"""A sample of text from the newest snapshot, if the owner wants one: made by `pmtrain generate` in a process of its
own, with the least priority, where torch is installed. Where none can be made, a sentence says why."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS = 60
REST_SECONDS = 60.0  # between the end of one sample and the next
MOST_SECONDS = 300.0
LOOK_SECONDS = 2.0
LEAST_PRIORITY = 19
MOST_TEXT = 2000  # characters


class Sampler:
    """`newest`: the step of the newest complete snapshot; 0 where there is none."""

    def __init__(self, run_dir: Path, prompt: str, newest: Callable[[], int]):
        self._run_dir, self._prompt, self._newest = run_dir, prompt, newest
        self.shown: dict[str, Any] = {"prompt": prompt, "text": "", "step": 0, "why": "waiting for the first snapshot"}

    async def run(self) -> None:
        if importlib.util.find_spec("torch") is None:
            self.shown["why"] = "torch is not installed on the coordinator's machine"
            return
        while True:
            step = self._newest()
            if step > self.shown["step"]:
                self.shown = await self._make(step)
                await asyncio.sleep(REST_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def _make(self, step: int) -> dict[str, Any]:
        words = ["generate", str(self._run_dir), "--prompt", self._prompt, "--tokens", str(TOKENS), "--device", "cpu"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "protomodels_cli", *words),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, LEAST_PRIORITY)
        try:
            async with asyncio.timeout(MOST_SECONDS):
                said, failed = await process.communicate()
        except TimeoutError:
            said, failed = b"", f"it took more than {MOST_SECONDS:.0f} s".encode()
        finally:
            if process.returncode is None:
                process.kill()
        found = {"prompt": self._prompt, "step": step, "at": time.time()}
        if process.returncode == 0:
            return {**found, "text": said.decode(errors="replace").strip()[:MOST_TEXT], "why": ""}
        first = (failed.decode(errors="replace").strip().splitlines() or ["the process ended"])[0]
        return {**found, "text": "", "why": first[:MOST_TEXT]}
