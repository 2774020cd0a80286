"""What a machine by itself must have: versions, a device that torch can use, memory, disk, open files. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from protomodels_cli import installing
from protomodels_cli.doctor.facts import Folder, Machine, Need, StepTried, Torch
from protomodels_cli.doctor.findings import Finding, ok, skipped
from protomodels_cli.quantities import plural, size

LEAST_PYTHON = (3, 11)
LITTLE_MEMORY, LEAST_MEMORY = 4 << 30, 1 << 30  # of the machine's own: torch alone takes most of the second
LITTLE_DISK, LEAST_DISK = 10 << 30, 64 << 20  # where no run says what it needs
LITTLE_CARD = 3 << 30
FULL = 0.5  # of a card's memory: other programs have more than that
FEW_FILES = 256  # a peer's links and calls, and those of its libraries
# Kinds of GPUs on which nobody of the project has trained.
NOT_TRIED = {
    "mps": "Apple GPUs were not tried by us; this test is what speaks for yours",
    "rocm": "AMD GPUs were not tried by us; this test is what speaks for yours",
}
WHEELS = "https://download.pytorch.org/whl"


def local(m: Machine, need: Need | None = None) -> list[Finding]:
    """`need`: of the run that it would join."""
    found = [_software(m), _torch(m), _device(m, need), _memory(m, need)]
    return [*found, *(_folder(m, folder, need) for folder in m.folders), _open_files(m)]


def _software(m: Machine) -> Finding:
    python = ".".join(map(str, m.python))
    figure = f"pmtrain {m.pmtrain} (protocol {m.protocol}), Python {python}"
    if m.python[:2] >= LEAST_PYTHON:
        return ok("software", figure)
    least = ".".join(map(str, LEAST_PYTHON))
    fixes = (f"install Python {least} or newer", "make a new environment with it, and install pmtrain there")
    return Finding("software", "old_python", "fail", figure, f"pmtrain needs Python {least} or newer", fixes)


def _torch(m: Machine) -> Finding:
    if m.torch is None:
        why = "torch is not installed: this machine can lead a run, and hold no stage"
        fixes = (
            installing.package("torch>=2.9"),
            "or lead alone: pmtrain coordinator",
        )
        return Finding("torch", "no_torch", "fail", "not installed", why, fixes)
    built = "for CPUs" if m.torch.cuda is None else f"for CUDA {_dotted(m.torch.cuda)}"
    figure = f"{m.torch.version}, built {built}"
    if m.driver is None or m.driver.cards == 0:
        return ok("torch", figure)
    figure += f"; the driver runs CUDA up to {_dotted(m.driver.cuda)}"
    wants_cpu = m.device == "cpu"
    if m.torch.cuda is None:
        why = f"this machine has {plural(m.driver.cards, 'NVIDIA card')}, and this torch cannot use any"
        fixes = (
            f"pip install --force-reinstall torch --index-url {WHEELS}/cu{_wheel(m.driver.cuda)}",
            "or compute on the CPU on purpose: pmtrain join LINK --device cpu",
        )
        return Finding("torch", "cpu_only_torch", "ok" if wants_cpu else "warn", figure, why, fixes)
    if not m.torch.cards and not wants_cpu:
        return _unusable(m, m.torch, figure)
    return ok("torch", figure)


def _unusable(m: Machine, torch: Torch, figure: str) -> Finding:
    assert m.driver is not None
    assert torch.cuda is not None
    if m.driver.cuda[0] < torch.cuda[0]:
        why = (
            f"the NVIDIA driver is too old for this torch ({torch.detail})" if torch.detail else "the driver is too old"
        )
        fixes = (
            f"update the NVIDIA driver to one for CUDA {_dotted(torch.cuda)} or newer, and restart the machine",
            f"or take the torch for this driver: pip install --force-reinstall torch --index-url "
            f"{WHEELS}/cu{_wheel(m.driver.cuda)}",
        )
        return Finding("torch", "old_driver", "fail", figure, why, fixes)
    why = f"torch cannot use the card: {torch.detail or 'it does not say why'}"
    more = (
        "look whether nvidia-smi shows the card; if not, load or reinstall the driver, and restart the machine",
        "look whether CUDA_VISIBLE_DEVICES hides it: unset CUDA_VISIBLE_DEVICES",
        "in a container: start it with --gpus all",
        "or compute on the CPU: pmtrain join LINK --device cpu",
    )
    return Finding("torch", "card_unusable", "fail", figure, why, more)


def _device(m: Machine, need: Need | None) -> Finding:
    if m.torch is None:
        return skipped("device", "not checked: needs torch")
    if m.device == "cpu" or not m.torch.cards:
        return ok("device", "CPU")
    index = int(m.device.partition(":")[2] or 0) if m.device.startswith("cuda") else 0
    if index >= len(m.torch.cards):
        fixes = tuple(f"use --device cuda:{i}: {card.name}" for i, card in enumerate(m.torch.cards))
        why = f"there is no cuda:{index} here"
        return Finding("device", "no_such_device", "fail", plural(len(m.torch.cards), "card"), why, fixes)
    card = m.torch.cards[index]
    figure = f"{card.name}, {size(card.free)} of {size(card.total)} free"
    if need is not None and card.free < need.memory:
        why = f"the smallest stage of this run needs {size(need.memory)}, and cuda:{index} has {size(card.free)} free"
        fixes = (
            "end other programs that use the card: nvidia-smi lists them",
            *(f"use --device cuda:{i}" for i, other in enumerate(m.torch.cards) if other.free >= need.memory),
            "ask the run's owner for more stages: each is smaller then",
        )
        return Finding("device", "device_too_small", "fail", figure, why, fixes)
    if card.free < FULL * card.total or card.free < LITTLE_CARD:
        why = "other programs use much of the card, or it is small"
        return Finding(
            "device", "card_in_use", "warn", figure, why, ("end other programs that use it: nvidia-smi lists them",)
        )
    return ok("device", figure)


def one_step(tried: StepTried) -> Finding:
    """Whether the device computes what the CPU does."""
    note = NOT_TRIED.get(tried.kind, "")
    if tried.detail:
        why = f"a training step is not possible on {tried.device}: {tried.detail}"
        fixes = ("install a newer torch and driver for this device", "or compute on the CPU: --device cpu")
        return Finding("one step", "step_failed", "fail", note or tried.device, why, fixes)
    words = ", ".join(f"{dtype} by {share:.1g}" for dtype, share in tried.off)
    figure = f"{tried.device} is off the CPU's float64: {words}"
    if tried.wrong:
        why = (
            f"in {' and '.join(tried.wrong)} {tried.device} computes something else than the CPU: do not train with it"
        )
        more = ("install a newer torch and driver for this device", "test its memory", "or use --device cpu")
        return Finding("one step", "wrong_results", "fail", figure, why, more)
    return ok("one step", f"{figure}: it computes what the CPU does{f' ({note})' if note else ''}")


def _memory(m: Machine, need: Need | None) -> Finding:
    if m.memory is None:
        return skipped("memory", "not checked: needs psutil")
    figure = f"{size(m.memory)} free"
    on_cpu = m.torch is None or not m.torch.cards or m.device == "cpu"
    if need is not None and on_cpu and m.memory < need.memory:
        why = f"the smallest stage of this run needs {size(need.memory)}"
        fixes = ("end other programs", "join with a machine that has more memory, or with a GPU")
        return Finding("memory", "memory_too_small", "fail", figure, why, fixes)
    if m.memory < LEAST_MEMORY:
        return Finding(
            "memory",
            "memory_too_small",
            "fail",
            figure,
            f"a peer needs {size(LEAST_MEMORY)} at least",
            ("end other programs",),
        )
    if m.memory < LITTLE_MEMORY:
        fixes = ("end other programs", "limit what the run may take: pmtrain join LINK --memory 8gib")
        return Finding("memory", "little_memory", "warn", figure, "a stage of any size may not fit", fixes)
    return ok("memory", figure)


def _folder(m: Machine, folder: Folder, need: Need | None) -> Finding:
    check, option = {
        "peer": ("disk, peer", "pmtrain join LINK --dir"),
        "cache": ("disk, cache", "export PMTRAIN_CACHE="),
        "runs": ("disk, runs", "pmtrain coordinator SPEC --dir"),
    }[folder.what]
    elsewhere = f"use a folder on another disk: {option}{'' if option.endswith('=') else ' '}/path/with/space"
    if folder.detail:
        why = f"{folder.path} cannot be written: {folder.detail}"
        owner = f'sudo chown -R "$USER" {folder.path}'
        return Finding(check, "folder_not_writable", "fail", folder.path, why, (f"make it yours: {owner}", elsewhere))
    figure = f"{size(folder.free)} free in {folder.path}"
    fixes = (f"free some space: du -xh {folder.path} | sort -h | tail", elsewhere)
    least = need.disk if need is not None and folder.what == "peer" else LEAST_DISK
    if folder.free < least:
        return Finding(check, "disk_too_small", "fail", figure, f"{size(least)} are needed there at least", fixes)
    little = 3 * need.disk if need is not None and folder.what == "peer" else LITTLE_DISK
    if folder.free < little:
        why = f"snapshots of a larger stage may not fit: {size(little)} would be ample"
        return Finding(check, "little_disk", "warn", figure, why, fixes)
    return ok(check, figure)


def _open_files(m: Machine) -> Finding:
    if m.open_files is None:
        return ok("open files", "no limit")
    figure = f"{m.open_files:,} may be open"
    if m.open_files >= FEW_FILES:
        return ok("open files", figure)
    return Finding(
        "open files", "few_open_files", "warn", figure, f"a peer may need {FEW_FILES}", tuple(_more_files(m))
    )


def _more_files(m: Machine) -> Iterator[str]:
    if m.most_open_files is None or m.most_open_files >= FEW_FILES:
        yield (
            "in this shell: ulimit -n 4096" if (m.most_open_files or 4096) >= 4096 else f"ulimit -n {m.most_open_files}"
        )
    yield "for good: add `* soft nofile 4096` and `* hard nofile 4096` to /etc/security/limits.conf, and log in again"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _wheel(cuda: tuple[int, int]) -> str:
    """The newest of torch's builds that such a driver runs."""
    built = [(11, 8), (12, 6), (12, 8), (12, 9), (13, 0)]
    fitting = [v for v in built if v[0] < cuda[0] or v <= cuda]
    major, minor = fitting[-1] if fitting else built[0]
    return f"{major}{minor}"
