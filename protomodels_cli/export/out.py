"""The folder of an exported model: whether it can be made, and why it could not. Needs no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from protomodels_cli.errors import UserError
from protomodels_cli.export.shelves import NO_ROOM


def check_free(out: Path) -> None:
    """Raises UserError where there is something already: nothing is overwritten."""
    try:
        taken = out.is_symlink() or (any(out.iterdir()) if out.is_dir() else out.exists())
        fixed = "a mount point" if os.path.ismount(out) else "the folder you are in" if _is_here(out) else None
    except OSError as e:
        raise not_written(out, e) from None
    if taken:
        raise UserError(
            f"{out} exists already", "choose another folder, or delete it; an export overwrites nothing", "out_exists"
        )
    if fixed:
        raise UserError(f"{out} is {fixed}: the finished model cannot take its place", _inside(out), "out_fixed")


def _is_here(out: Path) -> bool:
    return out.is_dir() and out.samefile(".")


def not_written(out: Path, error: OSError) -> UserError:
    what = f"cannot write {out}: {error.strerror or error}"
    if error.errno in NO_ROOM:
        return UserError(what, "free some space there, or choose a folder on another disk", "disk_full")
    if error.errno in (errno.EXDEV, errno.EBUSY):
        return UserError(what, _inside(out), "out_fixed")
    if error.errno == errno.EIO:
        return UserError(what, "check that disk, or choose a folder on another one", "disk_failed")
    return UserError(what, "choose a folder that you may write to", "out_not_writable")


def _inside(out: Path) -> str:
    return f"choose a new folder in it, for example {out / 'model'}"
