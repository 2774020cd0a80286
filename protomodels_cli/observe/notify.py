"""Messages to the owner of a run who looks elsewhere: to a topic of ntfy, a webhook of Discord, or a command.

Knows one text at a time. It must not know the run, nor what the text is of. A URL is a secret: only its host is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from protomodels_cli import timeouts
from protomodels_cli.errors import OptionError
from protomodels_cli.wire.addresses import is_private
from protomodels_cli.wire.channels import is_loopback

COMMAND = "exec:"
MOST_TEXT = 1500  # characters; Discord takes 2,000
MOST_WAITING = 50  # texts
HTTP_SECONDS, COMMAND_SECONDS = 10.0, 30.0


@dataclass(frozen=True)
class Target:
    kind: Literal["ntfy", "discord", "command"]
    address: str  # a URL, or the words of a command

    @property
    def shown(self) -> str:
        """Without what is secret."""
        if self.kind == "command":
            return shlex.split(self.address)[0]
        return f"{urlsplit(self.address).scheme}://{urlsplit(self.address).hostname}/…"


def parse_target(text: str) -> Target:
    """Raises OptionError, which shows nothing of a URL."""
    if text.startswith(COMMAND):
        return Target("command", _checked_command(text.removeprefix(COMMAND)))
    try:
        url = urlsplit(text)
        host, _ = url.hostname or "", url.port
    except ValueError:
        url, host = urlsplit(""), ""
    fix = "write https://ntfy.sh/TOPIC, the https URL of a Discord webhook, or 'exec:COMMAND'"
    if url.scheme not in ("https", "http") or not host or not url.path.strip("/"):
        raise OptionError("--notify: must be the URL of a topic or a webhook, or a command", fix, "notify")
    if url.scheme == "http" and not (is_loopback(host) or is_private(host)):
        what = f"--notify: http://{host} sends the run's messages and the URL in the clear"
        raise OptionError(what, "use https; http is for a server in your own network", "notify")
    is_discord = host.endswith(("discord.com", "discordapp.com")) or url.path.startswith("/api/webhooks/")
    return Target("discord" if is_discord else "ntfy", text)


def _checked_command(words: str) -> str:
    try:
        split = shlex.split(words)
    except ValueError as e:
        raise OptionError(f"--notify exec:{words}: {e}", "close what is quoted", "notify") from None
    if not split or shutil.which(split[0]) is None:
        name = split[0] if split else ""
        raise OptionError(f"--notify exec: there is no command {name!r}", "name a program with its path", "notify")
    return words


def send(target: Target, title: str, text: str) -> None:
    """Blocks, for a limited time. Raises OSError with a reason that shows nothing of the URL."""
    text = text[:MOST_TEXT]
    try:
        if target.kind == "command":
            _run([*shlex.split(target.address), f"{title}: {text}"])
            return
        if target.kind == "discord":
            body, headers = json.dumps({"content": f"**{title}**: {text}"}).encode(), {}
            headers["Content-Type"] = "application/json"
        else:
            printable = title.encode("ascii", "replace").decode()
            body, headers = text.encode(), {"Title": printable, "Content-Type": "text/plain; charset=utf-8"}
        request = urllib.request.Request(target.address, body, {**headers, "User-Agent": "pmtrain"})
        with urllib.request.urlopen(request, timeout=HTTP_SECONDS):
            pass
    except urllib.error.HTTPError as e:
        raise OSError(f"answered {e.code} {e.reason}") from None
    except urllib.error.URLError as e:
        raise OSError(str(getattr(e.reason, "strerror", None) or e.reason)) from None
    except TimeoutError:
        raise OSError("no answer in time") from None
    except ValueError:  # http.client on characters that no URL may have
        raise OSError("the URL is none") from None


def _run(command: list[str]) -> None:
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"did not end within {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise OSError(f"ended with exit code {done.returncode}")


class Notifier:
    """Sends texts in the background, in order, each a few times at most. `failed`: is told once, until one arrives."""

    def __init__(self, target: Target, title: str, failed: Callable[[str, str], None]):
        self._target, self._title, self._failed = target, title, failed
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self._is_told = False
        self._sending: asyncio.Task[None] | None = None

    def __call__(self, text: str) -> None:
        if self._texts.qsize() < MOST_WAITING:
            self._texts.put_nowait(text)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def close(self) -> None:
        """Returns once everything was sent, or after a while."""
        if self._sending is not None:
            self._texts.put_nowait(None)
            await asyncio.wait({self._sending}, timeout=timeouts.NOTIFY_LAST)
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_all(self) -> None:
        while (text := await self._texts.get()) is not None:
            await self._send(text)

    async def _send(self, text: str) -> None:
        why = ""
        for pause in (*timeouts.NOTIFY_AGAIN, None):
            try:
                await asyncio.to_thread(send, self._target, self._title, text)
            except OSError as e:
                why = str(e)
            else:
                self._is_told = False
                return
            if pause is not None:
                await asyncio.sleep(pause)
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(Exception):  # a message that cannot be sent must end nothing
                self._failed(self._target.shown, why)
