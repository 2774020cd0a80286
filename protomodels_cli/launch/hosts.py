"""Hosts of their own on this machine: network namespaces with a home connection each, for tests and benchmarks.

    with Hosts(4, parse_link("80mbit,25ms")) as hosts:
        subprocess.run(hosts.command(1, ["ping", "-c3", hosts.address(0)]))

Programs in them use the kernel's own TCP, unchanged; what is emulated is the line between them (`router.py`). The
machine's own network is neither used nor changed, and nothing else can be reached from a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from protomodels_cli.errors import OptionError, UserError
from protomodels_cli.launch.router import remove
from protomodels_cli.launch.system_tools import system_tool
from protomodels_cli.spec.schema import LinkSpec

NETWORK = "198.18.0"  # set aside for benchmarks (RFC 2544): no host of the internet has such an address
MOST_HOSTS = 250
DEVICE = "wan"
TUN = Path("/dev/net/tun")
NAMESPACES = Path("/run/netns")
LEAVE_SECONDS = 10.0

# linux/if_tun.h and linux/sched.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000

# Every host is a stock Linux, however the machine is tuned. A kernel whose own choice is not Cubic may keep it from a
# namespace; Reno is never kept, and like Cubic (and unlike BBR) slows down when packets are lost.
CONGESTION_CONTROLS = ("cubic", "reno")
SETTINGS = {"tcp_rmem": "4096 131072 6291456", "tcp_wmem": "4096 16384 4194304"}

_numbers = itertools.count()  # a process may have several sets of hosts


def require() -> None:
    """Raises where this machine cannot emulate hosts."""
    if sys.platform != "linux":
        raise UserError(
            f"emulated hosts need Linux, and this is {sys.platform}", "run the command on Linux", "hosts_linux"
        )
    if os.geteuid() != 0:
        what = f"emulated hosts need root (user id 0), and this is user id {os.geteuid()}"
        raise UserError(what, "run the command with sudo, or in a container with --privileged", "hosts_root")
    system_tool("ip")
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as e:
        what = f"emulated hosts need {TUN}, which cannot be opened: {e.strerror}"
        raise UserError(what, "run `modprobe tun`, or give the container --device /dev/net/tun", "hosts_tun") from None


class Hosts:
    """`count` hosts that reach one another over one link each; up inside the `with` block, gone after it."""

    def __init__(self, count: int, link: LinkSpec):
        if not 1 <= count <= MOST_HOSTS:
            raise OptionError(
                f"{count} hosts: must be between 1 and {MOST_HOSTS}", "choose another number of hosts", "hosts_count"
            )
        self.count, self.link = count, link
        self.names = [f"pmtrain-{os.getpid()}-{next(_numbers)}" for _ in range(count)]
        self._router: subprocess.Popen[str] | None = None

    def address(self, host: int) -> str:
        return f"{NETWORK}.{range(self.count)[host] + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on a host. Everything else is this machine's: files, cores, users."""
        return [system_tool("ip"), "netns", "exec", self.names[host], *argv]

    def stats(self) -> dict[str, Any]:
        """The router's CPU seconds and each host's bytes on the wire and packets dropped (queue) and lost (chance)."""
        assert self._router is not None
        assert self._router.stdin is not None
        assert self._router.stdout is not None
        self._router.stdin.write("?\n")
        self._router.stdin.flush()
        return dict(json.loads(self._router.stdout.readline()))

    def __enter__(self) -> Hosts:
        require()
        fds: list[int] = []
        try:
            for host in range(self.count):
                self._make(host, fds)
            self._router = self._start_router(fds)
            self.stats()  # it answers: from now on it forwards
        except BaseException:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends whatever still runs on the hosts, then removes them."""
        if self._router is not None:
            assert self._router.stdin is not None
            assert self._router.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._router.stdin.close()  # this tells it to take the hosts down
            try:
                self._router.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._router.kill()
                self._router.wait()
            self._router.stdout.close()
            self._router = None
        remove(self.names)

    def _make(self, host: int, fds: list[int]) -> None:
        """A namespace with an address; adds the file that its packets come out of."""
        name = self.names[host]
        run_ip(["netns", "add", name])
        fds.append(_device_in(name, offload=not self.link.loss))
        steps = [
            "link set lo up",
            f"link set {DEVICE} addrgenmode none",  # no IPv6 chatter
            f"link set {DEVICE} mtu 1500 up",
            f"address add {self.address(host)}/24 dev {DEVICE}",
        ]
        run_ip(["-n", name, "-batch", "-"], "\n".join(steps))

    def _start_router(self, fds: list[int]) -> subprocess.Popen[str]:
        order = {
            "fds": fds,
            "names": self.names,
            "bits_per_second": self.link.bits_per_second,
            "latency": self.link.latency_s,
            "jitter": self.link.jitter_s,
            "loss": self.link.loss,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "protomodels_cli.launch.router", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for us: it must outlive the programs on the hosts
        )


def run_ip(arguments: Sequence[str], text: str = "") -> None:
    done = subprocess.run([system_tool("ip"), *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        what = f"`ip {' '.join(arguments)}` ended with exit code {done.returncode}: {done.stderr.strip()}"
        raise UserError(what, "run the command as root, or in a container with --privileged", "hosts_setup")


def _device_in(name: str, offload: bool) -> int:
    """Make the device and the settings in a namespace, in a thread of its own: entering one moves a thread."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _enter(name)
            _stock_settings()
            made.append(_open_device(offload))
        except OSError as e:
            made.append(e)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [result] = made
    if isinstance(result, OSError):
        what = f"cannot set up the emulated host {name}: {result.strerror} {result.filename or ''}".rstrip()
        raise UserError(what, "run the command as root, or in a container with --privileged", "hosts_setup")
    return result


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(NAMESPACES / name, os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(namespace)


def _stock_settings() -> None:
    folder = Path("/proc/sys/net/ipv4")  # of the thread's own namespace
    for setting, value in SETTINGS.items():
        (folder / setting).write_text(value)
    for name in CONGESTION_CONTROLS:
        with contextlib.suppress(PermissionError, FileNotFoundError):
            (folder / "tcp_congestion_control").write_text(name)
            return


def _open_device(offload: bool) -> int:
    """With offload, TCP hands over up to 64 KiB at once with a note of how to cut it: one packet's work instead of 45.

    Where packets can be lost it must not: each of the 45 has its own luck."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | (TUN_F_TSO4 if offload else 0))
    except BaseException:
        os.close(fd)
        raise
    return fd
