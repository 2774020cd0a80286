"""What a command line has wrong, in two lines: what it is, and the fix."""

from __future__ import annotations

import difflib
import re
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from protomodels_cli.errors import OptionError

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # click's own, or typer's copy of it: as typer has it


class Command(TyperCommand):
    """Its usage line shows arguments as one writes them: `[RUN] PEER`, which typer puts into braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_plain(piece) for piece in super().collect_usage_pieces(ctx)]


def _plain(piece: str) -> str:
    found = re.fullmatch(r"\[(\[.*\])\]|\{(.*)\}(\.\.\.)?", piece)
    if found is None:
        return piece
    inner, many = found[1] or found[2], found[3] or ""
    return inner if " " in inner else inner + many


class App(typer.Typer):
    """A list of commands that are all written like that."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=Command, **options)


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


MEANT = {  # what people type for a command with another name
    "start": ("coordinator", "join"),
    "run": ("coordinator", "join"),
    "train": ("coordinator", "join"),
    "serve": ("coordinator",),
    "lead": ("coordinator",),
    "list": ("runs",),
    "ls": ("runs",),
    "ps": ("runs",),
    "delete": ("rm",),
    "remove": ("rm",),
    "clean": ("rm",),
    "new": ("init",),
    "create": ("init",),
    "link": ("invite",),
    "share": ("invite",),
    "watch": ("top",),
    "log": ("logs",),
    "check": ("validate", "doctor"),
    "evaluate": ("eval",),
    "chat": ("generate",),
    "sample": ("generate",),
}


INSTEAD = {"leave": "a peer leaves with Ctrl-C in the terminal of its `pmtrain join`"}


def no_such_command(path: str, asked: str, names: list[str]) -> OptionError:
    """`names`: of all commands there are."""
    root, own = path.split()[0], {name: name for name in names if " " not in name}
    near = list(MEANT.get(asked, ())) if path == root else []
    if not near:  # a command of the first level before one of `lab` and `bench`
        last = {name.split()[-1]: name for name in reversed(names)}
        near = [among[word] for among in (own, last) for word in difflib.get_close_matches(asked, among, 1)][:1]
    meant = " or ".join(f"`{root} {name}`" for name in near)
    hint = f"did you mean {meant}? " if near else ""
    if path == root and asked in INSTEAD:
        hint = f"{INSTEAD[asked]}; "
    return OptionError(f"{path} {asked}: there is no such command", f"{hint}`{path} --help` lists them", "command")


def refused(error: Any) -> OptionError | None:
    """An error of the parser as one of ours; None where it only asks for help to be shown."""
    context = error.ctx
    if context is None:
        return OptionError(_one_line(error.format_message()), "see `pmtrain --help`", "usage")
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    if instead := _instead(error):
        return OptionError(f"{context.command_path}: {_one_line(error.format_message())}", instead, "usage")
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    what = f"{context.command_path}: {_one_line(error.format_message())}{_value_of(error)}"
    return OptionError(what, f"write {usage}; `{context.command_path} --help` explains", "usage")


def _value_of(error: Any) -> str:
    """What stands behind the option that is refused, where the parser does not say it."""
    names, words = getattr(getattr(error, "param", None), "opts", ()), sys.argv
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in names and (equals or i + 1 < len(words)):
            value = value if equals else words[i + 1]
            return "" if value in error.format_message() else f", and not {value!r}"
    return ""


def _instead(error: Any) -> str:
    """The option that does what an unknown one asks for."""
    known = {name for parameter in error.ctx.command.params for name in parameter.opts}
    asked = getattr(error, "option_name", "")
    if asked == "--json" and "--format" in known:
        return f"write --format json; `{error.ctx.command_path} --help` lists all options"
    return ""


def _one_line(text: str) -> str:
    words = " ".join(text.split()).rstrip(".")
    return words if words[1:2].isupper() else words[:1].lower() + words[1:]
