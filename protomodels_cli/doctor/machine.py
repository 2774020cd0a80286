"""Looks at this machine. Knows where systems keep such things; judges nothing, and needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import sys
from pathlib import Path

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.doctor.facts import Card, Driver, Firewall, Folder, FolderUse, Machine, System, Torch
from protomodels_cli.errors import first_line
from protomodels_cli.wire.channels import own_address
from protomodels_cli.wire.port_mapping import gateway


def look(folders: dict[FolderUse, Path], device: str = "auto", every_card: bool = True) -> Machine:
    """`folders`: by what they are for. `every_card`: also look how much is free on cards other than the one asked for,
    which takes some of their memory for as long as this process lives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        system=_system(),
        python=sys.version_info[:3],
        pmtrain=__version__,
        protocol=PROTOCOL,
        torch=_torch(device, every_card),
        driver=_driver(),
        memory=_memory(),
        folders=tuple(_folder(what, path) for what, path in folders.items()),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        most_open_files=None if hard == resource.RLIM_INFINITY else hard,
        firewall=_firewall(),
        lan=own_address(),
        gateway=gateway(),
        device=device,
    )


def _system() -> System:
    if sys.platform == "darwin":
        return "macos"
    if not sys.platform.startswith("linux"):
        return "other"
    with contextlib.suppress(OSError):
        if "microsoft" in Path("/proc/version").read_text().lower():
            return "wsl"
    return "linux"


def _torch(device: str, every_card: bool) -> Torch | None:
    try:
        import torch
    except ImportError:
        return None
    built = torch.version.cuda
    cuda = None if built is None else (int(built.split(".")[0]), int(built.split(".")[1]))
    cards, detail = [], ""
    if cuda is not None and device != "cpu":
        try:
            torch.cuda.init()
            chosen = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
            for i in range(torch.cuda.device_count()):
                about = torch.cuda.get_device_properties(i)
                free = torch.cuda.mem_get_info(i)[0] if every_card or i == chosen else about.total_memory
                cards.append(Card(about.name, free, about.total_memory))
        except (RuntimeError, AssertionError, ValueError) as e:
            detail = first_line(e)
    return Torch(torch.__version__, cuda, tuple(cards), detail)


def _driver() -> Driver | None:
    """From the driver's own library, which needs neither torch nor nvidia-smi."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, cards = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    if library.cuInit(0) == 0:
        library.cuDeviceGetCount(ctypes.byref(cards))
    return Driver((version.value // 1000, version.value % 1000 // 10), cards.value)


def _memory() -> int | None:
    try:
        import psutil
    except ImportError:  # where only a coordinator is installed
        return None
    return int(psutil.virtual_memory().available)


def _folder(kind: FolderUse, path: Path) -> Folder:
    """What is free where the folder is or would be made, and whether it could be written. Leaves nothing behind."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    shown = str(path)
    try:
        free = shutil.disk_usage(there).free
        if not there.is_dir():
            return Folder(kind, shown, free, f"{there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            return Folder(kind, shown, free, f"no permission to write to {there}")
        return Folder(kind, shown, free)
    except OSError as e:
        return Folder(kind, shown, 0, e.strerror or str(e))


def _firewall() -> Firewall | None:
    with contextlib.suppress(OSError):
        if "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text():
            return "ufw"
    if Path("/run/firewalld").is_dir():
        return "firewalld"
    return None
