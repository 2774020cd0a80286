"""What the shell offers for an argument: cheap, and never an error."""

from __future__ import annotations

import glob
import os


def spec_files(incomplete: str) -> list[str]:
    """Specs that begin like this: folders on the way to them, and files named *.yaml."""
    start = glob.escape(incomplete)
    files = [*glob.glob(f"{start}*.yaml"), *glob.glob(f"{start}*.yml")]
    if not incomplete:
        files += glob.glob("configs/*.yaml")
    return sorted([*files, *(folder + os.sep for folder in glob.glob(f"{start}*") if os.path.isdir(folder))])
