"""An invitation to a run: one block that installs pmtrain and joins, as text, as a QR code and as a page."""

from __future__ import annotations

import html
import io
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protomodels_cli import __version__, installing
from protomodels_cli.cli.control import ask_owner
from protomodels_cli.errors import OptionError
from protomodels_cli.files import write_whole

if TYPE_CHECKING:
    from protomodels_cli.wire.client import Operator
    from protomodels_cli.wire.pb.pmtrain_pb2 import CreateTokenReply

LONGEST_NAME = 60


@dataclass(frozen=True)
class Invitation:
    """Pure: the texts of an invitation."""

    run: str  # its name
    address: str  # of pmtrain
    join: str  # the command, without the program
    guest: str | None  # for one friend alone
    token: str | None  # its id, where it is not the run's own

    @property
    def blocks(self) -> dict[str, str]:
        return {tool: installing.block(way, self.join) for tool, way in installing.ways(self.address).items()}

    @property
    def needs(self) -> str:
        """What has to be there before."""
        wheel = "" if "://" in self.address else f", and {Path(self.address).name} where `{self.address}` says"
        return f"Linux, macOS or WSL2, with Python 3.11 to 3.14{wheel}"

    def fields(self) -> dict[str, Any]:
        ways = {tool: list(way.lines) for tool, way in installing.ways(self.address).items()}
        facts = {name: value for name, value in asdict(self).items() if name != "join"}
        return {**facts, "join": f"pmtrain {self.join}", "install": ways, "blocks": self.blocks}

    def text(self) -> str:
        first, *others = self.blocks.items()
        lines = [f"for {self.guest or 'your friends'}, to paste into a terminal ({self.needs}):", "", first[1], ""]
        for tool, block in others:
            lines += [f"or with {tool}:", "", block, ""]
        with_it = "one peer" if self.token else "everybody"
        return "\n".join([*lines, f"this lets {with_it} join who has it; take it back with {self.revoking}"])

    @property
    def revoking(self) -> str:
        return f"`pmtrain token revoke RUN {self.token or 'run'}`".replace("RUN", shlex.quote(self.run))

    def code(self) -> str:
        import segno

        out = io.StringIO()
        segno.make(self.blocks["pip"], micro=False).terminal(out, compact=True)
        return out.getvalue().rstrip("\n")

    def page(self) -> str:
        """One file, which fetches nothing."""
        import segno

        code = segno.make(self.blocks["pip"], micro=False).svg_inline(scale=4, border=4, light="#fff")
        first, *others = self.blocks.items()
        shown = f"<pre id=block>{html.escape(first[1])}</pre>\n<button id=copy>Copy</button>"
        more = "".join(f"<h2>Or with {tool}</h2>\n<pre>{html.escape(block)}</pre>\n" for tool, block in others)
        greeting = f"{html.escape(self.guest)}, you are" if self.guest else "You are"
        return PAGE.format(
            title=html.escape(f"Train {self.run} with us"),
            run=html.escape(self.run),
            greeting=greeting,
            needs=html.escape(self.needs),
            version=__version__,
            shown=shown,
            more=more,
            code=code,
        )


def invitation(run: str | None, guest: str | None, install_from: str | None) -> Invitation:
    """Of a run that is led on this machine. Raises UserError."""
    if guest is not None and not (guest.isprintable() and len(guest.strip()) > 0 and len(guest) <= LONGEST_NAME):
        what = f"--for {guest[:80]!r}: must have 1 to {LONGEST_NAME} characters that can be printed"
        raise OptionError(what, "write for example --for Ann", "guest_name")
    address = None if install_from is None else installing.check_address(install_from)
    folder, link, made = ask_owner(run, lambda desk: _token(desk, guest))
    if address is not None:
        write_whole(folder / installing.INSTALL_FROM, f"{address}\n".encode(), 0o600)
    address = address or installing.address_of(folder)
    if address is None:
        raise OptionError(
            "this pmtrain does not know where others can get it",
            "name the repository's address or a wheel with --install-from; it is asked for once",
            "install_from",
        )
    name, token = folder.resolve().name, None
    joining = f"join '{link}'"
    if guest is not None and made is not None:
        token = made.id
        joining = f"join '{replace(link, token=made.token)}' --name {shlex.quote(guest)}"
    return Invitation(name, address, joining, guest, token)


async def _token(desk: Operator, guest: str | None) -> CreateTokenReply | None:
    """A token for one peer, where the invitation is for one friend; None: the run's own will do."""
    if guest is not None:
        return await desk.create_token(1, 0.0, guest)
    await desk.status()  # an invitation to a run that nobody leads leads nowhere
    return None


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem; border: 1px solid #8888; border-radius: .5rem; }}
svg {{ max-width: 20rem; height: auto; background: #fff; }}
h2 {{ font-size: 1rem; }}
</style>
<h1>{title}</h1>
<p>{greeting} invited to train the language model <b>{run}</b> with others: your machine holds a part of its layers
while the command runs, and Ctrl-C leaves. It needs {needs}. Paste this into a terminal:</p>
{shown}
{more}
<h2>The same as a QR code</h2>
{code}
<p>Whoever has this page can join: keep it to yourself. pmtrain {version}.</p>
<script>
document.getElementById("copy").addEventListener("click", async (event) => {{
  await navigator.clipboard.writeText(document.getElementById("block").textContent);
  event.target.textContent = "Copied";
}});
</script>
</html>
"""
