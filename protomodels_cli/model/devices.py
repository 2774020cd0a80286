"""The device that a name means on this machine. Says in our words why there is none: torch's are a page."""

from __future__ import annotations

import torch

from protomodels_cli.quantities import plural


class NoDevice(ValueError):
    """Why torch has no such device here."""


def found(name: str) -> torch.device:
    """`auto` is the first CUDA GPU, else the CPU. Apple's GPU has to be asked for: it has no float64."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda":
        _check_cuda(int(index or 0))
    elif kind == "mps" and not torch.backends.mps.is_available():
        raise NoDevice("torch finds no GPU of Apple's here")
    elif kind not in ("cpu", "mps"):
        raise NoDevice("there is no such device")
    device = torch.device(name)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise NoDevice(str(e).splitlines()[0]) from None
    # Threads are told which card is theirs by its number.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _check_cuda(index: int) -> None:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        raise NoDevice(f"the torch that is installed here ({torch.__version__}) is built for CPUs alone")
    if not torch.cuda.is_available():
        raise NoDevice("torch finds no GPU that it can use here; `pmtrain doctor` says why")
    if index >= (cards := torch.cuda.device_count()):
        raise NoDevice(f"torch finds {plural(cards, 'GPU')} here, and counts from 0")
