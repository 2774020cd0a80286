"""What a command line has wrong, in two lines: what it is, and the fix."""

from __future__ import annotations

import difflib
from typing import Any

import typer
from typer.core import TyperGroup

from protomodels_cli.errors import OptionError

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # click's own, or typer's copy of it: as typer has it


class Commands(TyperGroup):
    """Commands by name, or the nearest one in words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        asked = args[0]
        if self.get_command(ctx, asked) is None and not ctx.resilient_parsing and not asked.startswith("-"):
            raise no_such_command(ctx.command_path, asked, _names(ctx.find_root().command))
        return super().resolve_command(ctx, args)


def _names(command: Any, before: str = "") -> list[str]:
    """Of all commands below this one, as `lab rank`."""
    inner = getattr(command, "commands", {})
    return [name for key, one in inner.items() for name in (f"{before}{key}", *_names(one, f"{before}{key} "))]


def no_such_command(path: str, asked: str, names: list[str]) -> OptionError:
    """`names`: of all commands there are."""
    last = {name.split()[-1]: name for name in reversed(names)}
    near = [last[word] for word in difflib.get_close_matches(asked, last, 1)]
    root = path.split()[0]
    hint = f"did you mean `{root} {near[0]}`? " if near else ""
    return OptionError(f"{path} {asked}: there is no such command", f"{hint}`{path} --help` lists them", "command")


def refused(error: Any) -> OptionError | None:
    """An error of the parser as one of ours; None where it only asks for help to be shown."""
    context = error.ctx
    if context is None:
        return OptionError(_one_line(error.format_message()), "see `pmtrain --help`", "usage")
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    what = f"{context.command_path}: {_one_line(error.format_message())}"
    return OptionError(what, f"write {usage}; `{context.command_path} --help` explains", "usage")


def _one_line(text: str) -> str:
    words = " ".join(text.split()).rstrip(".")
    return words if words[1:2].isupper() else words[:1].lower() + words[1:]
