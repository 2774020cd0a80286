"""What must be true of a machine's line to its coordinator. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from protomodels_cli.cost.saving import SLOW_LINE
from protomodels_cli.doctor.facts import Contact, Machine, Reach
from protomodels_cli.doctor.findings import Finding, ok, skipped
from protomodels_cli.quantities import duration, rate, size
from protomodels_cli.wire.addresses import is_private
from protomodels_cli.wire.tls import MOST_SKEW

SKEW = 5.0  # logs of two machines cannot be laid side by side any more
FAR = 0.4  # seconds of a round trip
NO_LINK = "not checked: give the join link as the argument"
CHECKS = "coordinator", "clock", "round trip", "upload", "download", "from outside", "router"


def line(m: Machine, contact: Contact | None) -> list[Finding]:
    if contact is None:
        return [skipped(check, NO_LINK) for check in CHECKS]
    if contact.failure is not None:
        failed, f = CHECKS[1:], contact.failure
        fixes = (f.fix, *(() if f.refused else _no_answer(contact)))
        first = Finding("coordinator", f.kind or "failed", "fail", contact.address, f.what, fixes, f.refused)
        return [first, *(skipped(check, "not checked: the coordinator was not reached") for check in failed)]
    who = f"{contact.address}, {contact.run}, pmtrain {contact.version}"
    found = [ok("coordinator", who), _clock(m, contact), _round_trip(contact)]
    rates = [_rate("upload", contact, contact.upload), _rate("download", contact, contact.download)]
    return [*found, *rates, _reach(m, contact), _router(contact)]


def _no_answer(contact: Contact) -> Iterator[str]:
    port = contact.address.rpartition(":")[2]
    yield f"on the coordinator's machine: is it running, and does its firewall let TCP port {port} in?"
    yield f"try from another network, as a phone's: nc -vz {contact.address.replace(f':{port}', '')} {port}"


def _clock(m: Machine, contact: Contact) -> Finding:
    if contact.ahead is None:
        return skipped("clock", "not checked")
    side = "ahead of" if contact.ahead >= 0 else "behind"
    figure = f"{duration(abs(contact.ahead))} {side} the coordinator's"
    if abs(contact.ahead) <= SKEW:
        return ok("clock", figure)
    fix = {
        "wsl": "in WSL the clock stops with the laptop's lid: sudo hwclock -s",
        "macos": "sudo sntp -sS time.apple.com",
    }.get(m.system, "sudo timedatectl set-ntp true")
    fixes = (f"set this clock: {fix}", "if this clock is right, ask the run's owner to set the coordinator's")
    if abs(contact.ahead) > MOST_SKEW:
        why = f"clocks may differ by {duration(MOST_SKEW)} at most"
        return Finding("clock", "clock_skew", "fail", figure, why, fixes)
    return Finding("clock", "clock_off", "warn", figure, "times in logs of different machines will not match", fixes)


def _round_trip(contact: Contact) -> Finding:
    if contact.round_trip is None:
        return skipped("round trip", contact.not_measured or "not checked")
    figure = duration(contact.round_trip)
    if contact.round_trip <= FAR:
        return ok("round trip", figure)
    why = "every step waits for one round trip to the coordinator"
    fixes = ("use a cable in place of Wi-Fi", "turn a VPN off", "ask for a coordinator that is nearer")
    return Finding("round trip", "far_away", "warn", figure, why, fixes)


def _rate(check: str, contact: Contact, bits: float | None) -> Finding:
    if bits is None:
        return skipped(check, contact.not_measured or "not checked")
    figure = rate(bits, "bit/s")
    if contact.need is not None and bits > 0:
        part = contact.need.disk
        figure += f"; the smallest stage's part of {size(part)} takes {duration(8 * part / bits)}"
    if bits >= SLOW_LINE:
        return ok(check, figure)
    way = "to" if check == "upload" else "from"
    why = f"snapshots count on {rate(SLOW_LINE, 'bit/s')} {way} the coordinator"
    fixes = (
        "use a cable in place of Wi-Fi, and look what else uses the line",
        "ask the run's owner to set limits.part_seconds higher, or to use more stages: parts are smaller then",
    )
    return Finding(check, f"slow_{check}", "warn", figure, why, fixes)


def _reach(m: Machine, contact: Contact) -> Finding:
    if contact.reach is None:
        return skipped("from outside", contact.not_measured or "not checked")
    reach = contact.reach
    if reach.reachable:
        who = "neighbours in this network" if is_private(reach.host) else "neighbours"
        return ok("from outside", f"{who} can dial {_address(reach.host, reach.port)}")
    relay, trip = min(reach.relays, key=lambda at: at[1], default=("the coordinator", None))
    through = relay if trip is None else f"relay {relay}, {duration(trip)}"
    why = (
        f"neighbours elsewhere cannot dial this machine ({reach.detail}); links to those whom it cannot dial either go "
        f"through {through}, which is slower"
    )
    fixes = tuple(_opening(m, reach))
    return Finding("from outside", "not_reachable", "warn", _address(reach.host, reach.port), why, fixes)


def _router(contact: Contact) -> Finding:
    """What it does for links that nobody can dial: says so and is never wrong, since links are relayed at worst."""
    if contact.reach is None or contact.reach.maps_by is None:
        return skipped("router", contact.not_measured or "not checked")
    by, keeps = contact.reach.maps_by, contact.reach.keeps_port
    ports = {
        True: "keeps ports, so that links need no relay where the neighbour's does as well",
        False: "gives every connection another port, so that links are not punched",
        None: "whether it keeps ports is not known",
    }[keeps]
    maps = f"maps ports by {by}: pmtrain join --map-port" if by else "answers neither NAT-PMP nor UPnP"
    return ok("router", f"{maps}; {ports}")


def _opening(m: Machine, reach: Reach) -> Iterator[str]:
    """How the port is opened, from this machine outwards."""
    port = reach.port
    if reach.maps_by:
        yield f"let the router do it, which answers {reach.maps_by}: pmtrain join --map-port"
    ufw, firewalld = (
        f"sudo ufw allow {port}/tcp",
        f"sudo firewall-cmd --permanent --add-port={port}/tcp && sudo firewall-cmd --reload",
    )
    match m.system, m.firewall:
        case "wsl", _:
            yield (
                "in Windows, in a PowerShell as administrator: netsh interface portproxy add v4tov4 "
                f"listenport={port} listenaddress=0.0.0.0 connectport={port} connectaddress={m.lan}"
            )
            yield (
                f"and there: New-NetFirewallRule -DisplayName pmtrain -Direction Inbound -Protocol TCP "
                f"-LocalPort {port} -Action Allow"
            )
        case "macos", _:
            yield "in System Settings, Network, Firewall: allow incoming connections for python"
        case _, "ufw":
            yield f"let it through this machine's firewall: {ufw}"
        case _, "firewalld":
            yield f"let it through this machine's firewall: {firewalld}"
        case _:
            yield f"where this machine has a firewall, let TCP port {port} in: {ufw}, or {firewalld}"
    if _shared(reach.host):
        yield f"the provider shares {reach.host} among homes (CGNAT): ask it for a public address, or use IPv6"
    elif m.lan != reach.host:
        router = f"http://{m.gateway}" if m.gateway else "its own page"
        to = "this machine's Windows address" if m.system == "wsl" else m.lan
        yield f"in the router ({router}): forward TCP port {port} of {reach.host} to {to}, port {port}"
    yield f"look again, then keep the port: pmtrain doctor LINK --port {port}, pmtrain join LINK --port {port}"
    yield "or leave it: it works relayed, and --no-listen does not even try"


def _shared(host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network("100.64.0.0/10")
    except (ValueError, TypeError):
        return False


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
