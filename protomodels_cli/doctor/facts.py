"""What is known of a machine and of its line to a coordinator. Data; nothing here looks or judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

System = Literal["linux", "wsl", "macos", "other"]
Firewall = Literal["ufw", "firewalld"]
FolderUse = Literal["peer", "cache", "runs"]
Version = tuple[int, int]
Kind = Literal["cpu", "cuda", "rocm", "mps"]  # of devices: torch calls two of them cuda


@dataclass(frozen=True)
class Card:
    name: str
    free: int  # bytes
    total: int


@dataclass(frozen=True)
class Driver:
    """NVIDIA's, as it is without torch."""

    cuda: Version  # the newest that it can run
    cards: int


@dataclass(frozen=True)
class Torch:
    version: str
    cuda: Version | None  # that it was built for; None: for CPUs alone
    cards: tuple[Card, ...]  # that it can use
    detail: str = ""  # why it can use none, in its words


@dataclass(frozen=True)
class Folder:
    what: FolderUse
    path: str
    free: int  # bytes
    detail: str = ""  # why nothing can be written there; empty: it can


@dataclass(frozen=True)
class StepTried:
    """One training step of a tiny model on a device, against the CPU in float64."""

    device: str
    kind: Kind
    off: tuple[tuple[str, float], ...] = ()  # by type of number: the share by which loss or gradients differ, at most
    wrong: tuple[str, ...] = ()  # of these, the types for which that is more than rounding
    detail: str = ""  # why the step was not possible, in torch's words


@dataclass(frozen=True)
class Machine:
    system: System
    python: tuple[int, int, int]
    pmtrain: str
    protocol: int
    torch: Torch | None  # None: not installed
    driver: Driver | None  # None: there is none
    memory: int | None  # free bytes of its own; None: not known
    folders: tuple[Folder, ...]
    open_files: int | None  # that this process may have; None: no limit
    most_open_files: int | None  # that it could ask for
    firewall: Firewall | None  # that is installed here
    lan: str  # its address on the way outside
    gateway: str | None  # the router's
    device: str = "auto"  # that `join` would be asked for


@dataclass(frozen=True)
class Failure:
    """Why a step was not possible, in the words of whoever refused."""

    kind: str
    what: str
    fix: str
    refused: bool = False  # by the coordinator, who could be reached


@dataclass(frozen=True)
class Reach:
    host: str  # where the coordinator sees this machine
    port: int
    reachable: bool
    detail: str = ""
    relays: tuple[tuple[str, float], ...] = ()  # of the run, those that answer: seconds there and back
    keeps_port: bool | None = None  # whether its router shows all of them the same port; None: too few have said
    maps_by: str | None = None  # by which protocol its router maps ports; empty: by none; None: not asked


@dataclass(frozen=True)
class Need:
    """Of the smallest stage that this machine could be asked to hold, in bytes."""

    memory: int
    disk: int


@dataclass(frozen=True)
class Contact:
    """With a coordinator. What failed early leaves the rest None."""

    address: str
    failure: Failure | None = None
    version: str | None = None  # the coordinator's pmtrain
    run: str | None = None
    need: Need | None = None
    ahead: float | None = None  # seconds that this clock is ahead of the coordinator's
    round_trip: float | None = None
    upload: float | None = None  # bits a second
    download: float | None = None
    not_measured: str = ""  # why not
    reach: Reach | None = None
