"""An internet with homes behind routers on this machine, for tests: network namespaces, real NAT, real TCP.

    with Nat() as net:
        subprocess.run(net.command("home_a", ["ping", "-c1", net.address("public")]))

Two homes with one machine each and one with two, each behind a router of its own that masquerades and lets nothing in;
and hosts with a public address. All homes use the same private addresses, as real ones do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from protomodels_cli.launch import hosts
from protomodels_cli.launch.hosts import run_ip
from protomodels_cli.launch.router import remove
from protomodels_cli.launch.system_tools import PACKAGES, system_tool

PUBLIC = {"coordinator": 1, "public": 2, "relay": 3, "relay_2": 4}  # host → last byte of its address
HOMES = {  # router → last byte of its public address, and of its machines' private ones
    "router_a": (11, {"home_a": 10}),
    "router_b": (12, {"home_b": 10}),
    "router_c": (13, {"lan_1": 10, "lan_2": 11}),
}
SERVERS = ("coordinator", "relay", "relay_2")
INTERNET, LAN = "198.51.100", "192.168.1"  # the first is set aside for documentation (RFC 5737)
RULES = """*filter
:INPUT DROP
:FORWARD DROP
:OUTPUT ACCEPT
-A INPUT -i lo -j ACCEPT
-A FORWARD -m conntrack --ctstate INVALID -j DROP
-A FORWARD -i lan -o lan -j ACCEPT
-A FORWARD -i lan -o wan -j ACCEPT
-A FORWARD -i wan -o lan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
COMMIT
*nat
-A POSTROUTING -o wan -j MASQUERADE{ports}
COMMIT
"""
INTERNET_6, HOME_6 = (
    "2001:db8::{}",
    "2001:db8:0:{}::{}",
)  # set aside as well (RFC 3849); a home has a network of its own
RULES_6 = """*filter
:INPUT DROP
:FORWARD DROP
:OUTPUT ACCEPT
-A INPUT -i lo -j ACCEPT
-A INPUT -p ipv6-icmp -j ACCEPT
-A FORWARD -i lan -o wan -j ACCEPT
-A FORWARD -i wan -o lan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
COMMIT
"""


def require() -> None:
    """Raises where this machine cannot emulate routers."""
    hosts.require()
    for name in PACKAGES:
        system_tool(name)


class Nat:
    """Up inside the `with` block, gone after it. `mbit`: of every peer's line, each way; 0: as fast as it goes, as
    servers' lines are. `idle_seconds`: after which routers forget a connection; 0: after days. Routers keep the port
    that a machine connects from; `symmetric`: they give every connection another one. `ipv6`: in its place, where every
    machine has an address of its own and routers only let nothing in."""

    def __init__(self, mbit: float = 0, idle_seconds: int = 0, symmetric: bool = False, ipv6: bool = False):
        self._mbit, self._idle, self._ipv6 = mbit, idle_seconds, ipv6
        self._rules = RULES.format(ports=" --random-fully" if symmetric else "")
        homes = [name for _, machines in HOMES.values() for name in machines]
        self.hosts = [*PUBLIC, *homes]
        self._names = {name: f"pmtrain-{os.getpid()}-{name}" for name in ("internet", *self.hosts, *HOMES)}
        self._guard: subprocess.Popen[str] | None = None

    def address(self, host: str) -> str:
        """As others see it: of a machine at home, its router's."""
        for public, machines in HOMES.values():
            if host in machines and self._ipv6:
                return HOME_6.format(public, machines[host])
            if host in machines:
                return f"{INTERNET}.{public}"
        return INTERNET_6.format(PUBLIC[host]) if self._ipv6 else f"{INTERNET}.{PUBLIC[host]}"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return [system_tool("ip"), "netns", "exec", self._names[host], *argv]

    def __enter__(self) -> Nat:
        require()
        order = {"fds": [], "names": list(self._names.values())}
        still = {"bits_per_second": 1, "latency": 0, "jitter": 0, "loss": 0}
        # It moves no packets here: it takes the hosts down also where this process was killed and could not.
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "protomodels_cli.launch.router", json.dumps({**order, **still})],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends whatever still runs there, then removes it."""
        remove(list(self._names.values()))
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def rehome(self, machine: str, router: str) -> None:
        """Carry a machine to the home behind another router: another public address, and its connections are dead."""
        run_ip(["-n", self._names[machine], "link", "delete", "lan"])
        self._plug(machine, router, 99)

    def let_in(self, machine: str, port: int) -> None:
        """Its router forwards this port to it from now on, as its owner may tell it to."""
        for router, (_, machines) in HOMES.items():
            if machine in machines:
                to = f"{LAN}.{machines[machine]}"
                rule = ["-i", "wan", "-p", "tcp", "--dport", str(port)]
                self._run(router, ["iptables", "-t", "nat", "-A", "PREROUTING", *rule, "-j", "DNAT", "--to", to])
                self._run(router, ["iptables", "-A", "FORWARD", *rule, "-d", to, "-j", "ACCEPT"])

    def _make(self) -> None:
        for name in self._names.values():
            run_ip(["netns", "add", name])
        for name in self._names:
            self._batch(name, "link set lo up")
        self._batch("internet", "link add name net type bridge", "link set net up")
        for name, last in PUBLIC.items():
            self._wire(name, "wan", "internet", name, "net")
            self._batch(name, f"address add {INTERNET}.{last}/24 dev wan", "link set wan up")
        for router, (last, machines) in HOMES.items():
            self._wire(router, "wan", "internet", router, "net")
            self._batch(
                router,
                f"address add {INTERNET}.{last}/24 dev wan",
                "link set wan up",
                "link add name lan type bridge",
                f"address add {LAN}.1/24 dev lan",
                "link set lan up",
            )
            settings = {"net.ipv4.ip_forward": 1, "net.netfilter.nf_conntrack_tcp_loose": 0}
            if self._idle:
                settings["net.netfilter.nf_conntrack_tcp_timeout_established"] = self._idle
            self._run(router, ["sysctl", "-q", "-w", *(f"{name}={value}" for name, value in settings.items())])
            self._run(router, ["iptables-restore"], self._rules)
            for machine, own in machines.items():
                self._plug(machine, router, own)
        if self._ipv6:
            self._make_ipv6()

    def _make_ipv6(self) -> None:
        """In place of IPv4, which goes."""
        routers = {router: last for router, (last, _) in HOMES.items()}
        for name, last in {**PUBLIC, **routers}.items():
            ways = [
                f"-6 route add {HOME_6.format(there, '')}/64 via {INTERNET_6.format(there)}"
                for router, there in routers.items()
                if router != name
            ]
            address = f"address add {INTERNET_6.format(last)}/64 dev wan nodad"
            self._batch(name, "address flush dev wan scope global", address)
            for way in ways:
                run_ip(["-n", self._names[name], *way.split()])
        for router, (last, machines) in HOMES.items():
            self._batch(
                router, "address flush dev lan scope global", f"address add {HOME_6.format(last, 1)}/64 dev lan nodad"
            )
            self._run(router, ["sysctl", "-q", "-w", "net.ipv6.conf.all.forwarding=1"])
            self._run(router, ["ip6tables-restore"], RULES_6)
            for machine, own in machines.items():
                self._batch(
                    machine,
                    "address flush dev lan scope global",
                    f"address add {HOME_6.format(last, own)}/64 dev lan nodad",
                )
                run_ip(["-n", self._names[machine], "-6", "route", "add", "default", "via", HOME_6.format(last, 1)])

    def _plug(self, machine: str, router: str, own: int) -> None:
        self._wire(machine, "lan", router, machine, "lan")
        self._batch(machine, *self._at_home(own))

    def _at_home(self, last_byte: int) -> list[str]:
        return [
            f"address add {LAN}.{last_byte}/24 dev lan",
            "link set lan up",
            f"route replace default via {LAN}.1",
        ]

    def _wire(self, a: str, device: str, b: str, port: str, bridge: str) -> None:
        """A cable from a's device to a port of b's bridge; a public one carries so much each way."""
        there, port = self._names[b], port[:15]
        run_ip(
            ["-n", self._names[a], "link", "add", "name", device, "type", "veth", "peer", "name", port, "netns", there]
        )
        self._batch(b, f"link set {port} master {bridge} up")
        if device == "wan" and a not in SERVERS and self._mbit:
            shape = ["root", "tbf", "rate", f"{self._mbit:g}mbit", "burst", "32kb", "latency", "100ms"]
            self._run(a, ["tc", "qdisc", "add", "dev", device, *shape])
            self._run(b, ["tc", "qdisc", "add", "dev", port, *shape])

    def _batch(self, name: str, *steps: str) -> None:
        run_ip(["-n", self._names[name], "-batch", "-"], "\n".join(steps))

    def _run(self, name: str, argv: Sequence[str], text: str = "") -> None:
        tool, *arguments = argv
        run_ip(["netns", "exec", self._names[name], system_tool(tool), *arguments], text)
