"""Checks, without a network, that each list in requirements/ is complete and installs on every promised Python.

It reads texts and knows nothing of pip: `refresh_pins.py` makes the lists. CONTRIBUTING.md explains both.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_wheel_filename

# Each list, the lists that it includes, and the extras of pyproject.toml that it serves.
# `coordinator` and `peer` serve the dependencies, `torch` and `cuda` are phases of `peer`, `pip` installs all others.
INCLUDES: dict[str, tuple[str, ...]] = {
    "pip": (),
    "coordinator": (),
    "torch": (),
    "cuda": (),
    "peer": ("torch", "coordinator"),
    "user": ("peer",),
    "test": ("user",),
    "all": ("test",),
}
EXTRAS = {"user": "lab", "test": "test", "all": "all"}
NOT_FOR_A_COORDINATOR = {"torch", "safetensors", "psutil", "zstandard"}  # tensors, or a peer's work
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
GLIBC = 28  # 2.28, and macOS 14: torch's own wheels need these
MACOS = (14, 0)
PATCHES = range(30)  # a package may refuse one patch release


@dataclass(frozen=True)
class Environment:
    python: str  # "3.11"
    system: str
    machine: str

    def __str__(self) -> str:
        return f"Python {self.python} on {self.system} {self.machine}"

    @property
    def minor(self) -> tuple[int, int]:
        major, minor = self.python.split(".")
        return int(major), int(minor)

    def markers(self) -> dict[str, str]:
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": self.system,
            "platform_system": self.system.capitalize(),
            "platform_machine": self.machine,
            "platform_release": "",
            "platform_version": "",
            "extra": "",
        }


@cache
def tags_of(env: Environment) -> frozenset[Tag]:
    """The wheel tags that pip accepts there."""
    if env.system == "darwin":
        platforms = [*mac_platforms(MACOS, env.machine)]
    else:
        named = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        new = [f"manylinux_2_{minor}_{env.machine}" for minor in range(GLIBC, 4, -1)]
        platforms = new + [f"{name}_{env.machine}" for name in named.values()]
    abi = "cp{}{}".format(*env.minor)
    return frozenset(
        itertools.chain(cpython_tags(env.minor, [abi], platforms), compatible_tags(env.minor, abi, platforms))
    )


@cache
def fits(file: str, env: Environment) -> bool:
    """A source archive fits everywhere. Only list `all` may have one."""
    return not file.endswith(".whl") or not tags_of(env).isdisjoint(parse_wheel_filename(file)[3])


@cache
def refused(requires_python: str, env: Environment, promised: SpecifierSet) -> str | None:
    """The first promised release of that Python that may not install it."""
    allowed = SpecifierSet(requires_python)
    releases = promised.filter(f"{env.python}.{patch}" for patch in PATCHES)
    return next((python for python in releases if python not in allowed), None)


@dataclass(frozen=True)
class Build:
    """Files of one version with equal metadata. torch has several: its CUDA builds need more than the others."""

    requires_python: str
    requires: tuple[str, ...]
    files: Mapping[str, tuple[str, int]]  # file name → sha256, bytes


@dataclass(frozen=True)
class Release:
    version: str
    builds: tuple[Build, ...]

    def hashes(self) -> set[str]:
        return {sha256 for build in self.builds for sha256, _ in build.files.values()}

    def builds_for(self, env: Environment) -> list[Build]:
        return [build for build in self.builds if any(fits(file, env) for file in build.files)]


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    marker: Marker | None
    hashes: frozenset[str]

    def applies(self, env: Environment) -> bool:
        return self.marker is None or self.marker.evaluate(env.markers())


@dataclass(frozen=True)
class Problem:
    kind: str
    list: str
    pin: str
    detail: str = ""

    def __str__(self) -> str:
        return f"requirements/{self.list}.txt: {self.pin}: {self.kind.replace('_', ' ')} {self.detail}".rstrip()


@dataclass
class Project:
    """Of pyproject.toml: the promised Pythons, and for each list the requirements that it must satisfy."""

    pythons: tuple[str, ...]
    promised: SpecifierSet  # without releases that are broken
    roots: dict[str, list[Requirement]]

    @classmethod
    def read(cls, pyproject: str) -> Project:
        table = tomllib.loads(pyproject)
        project, extras = table["project"], table["project"]["optional-dependencies"]
        pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))

        def flat(lines: Iterable[str]) -> Iterator[Requirement]:
            for requirement in map(Requirement, lines):
                if canonicalize_name(requirement.name) == project["name"]:
                    for extra in sorted(requirement.extras):
                        yield from flat(extras[extra])
                else:
                    yield requirement

        needs = [*flat(project["dependencies"])]
        build = [*flat(table["build-system"]["requires"])]  # pmtrain itself is built without isolation
        roots = {
            "pip": [Requirement("pip>=25.1")],  # which resumes a download; and reads an index in half the time of 23.0
            "coordinator": build + [n for n in needs if canonicalize_name(n.name) not in NOT_FOR_A_COORDINATOR],
            "torch": [n for n in needs if n.name == "torch"],
            "cuda": [],
            "peer": needs,
        }
        promised = SpecifierSet(project["requires-python"])
        return cls(tuple(pythons), promised, roots | {name: [*flat(extras[extra])] for name, extra in EXTRAS.items()})

    def environments(self) -> list[Environment]:
        return [Environment(python, *machine) for python in self.pythons for machine in MACHINES]


@dataclass
class Lists:
    project: Project
    pins: dict[str, dict[str, Pin]]  # of each list itself
    releases: dict[str, Release]
    wanted: dict[tuple[str, Environment], set[str]] = field(default_factory=dict)

    def closure(self, name: str) -> dict[str, Pin]:
        """The pins of a list and of those that it includes; with torch those that its CUDA builds need."""
        found = dict(self.pins[name]) | (self.pins["cuda"] if name == "torch" else {})
        for included in INCLUDES[name]:
            found |= self.closure(included)
        return found

    def roots(self, name: str) -> list[Requirement]:
        return [r for included in INCLUDES[name] for r in self.roots(included)] + self.project.roots[name]


def read_list(text: str) -> tuple[tuple[str, ...], dict[str, Pin]]:
    """The lists that it includes, and its own pins."""
    includes, pins = [], {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.startswith("-r "):
            includes.append(line.removeprefix("-r ").removesuffix(".txt"))
        elif line and not line.startswith("#"):
            wanted, *hashes = line.split(" --hash=sha256:")
            requirement = Requirement(wanted)
            [version] = requirement.specifier
            name = canonicalize_name(requirement.name)
            pins[name] = Pin(name, version.version, requirement.marker, frozenset(h.strip() for h in hashes))
    return tuple(includes), pins


def read_releases(text: str) -> dict[str, Release]:
    return {
        name: Release(
            one["version"],
            tuple(
                Build(
                    build["requires_python"],
                    tuple(build["requires"]),
                    {file: (row["sha256"], row["bytes"]) for file, row in build["files"].items()},
                )
                for build in one["builds"]
            ),
        )
        for name, one in json.loads(text).items()
    }


def check(texts: Mapping[str, str], releases: str, pyproject: str) -> list[Problem]:
    """All that keeps these lists from installing on a promised Python, or that contradicts pyproject.toml."""
    project = Project.read(pyproject)
    read = {name: read_list(text) for name, text in texts.items()}
    lists = Lists(project, {name: pins for name, (_, pins) in read.items()}, read_releases(releases))
    problems = [Problem("is_no_list", name, "") for name in texts.keys() ^ INCLUDES.keys()]
    if problems:
        return problems
    others = [name for name in INCLUDES if read[name][0] != INCLUDES[name]]
    problems += [Problem("includes_others", name, "", f"than {INCLUDES[name]}") for name in others]
    owners = defaultdict(list)
    for name, pins in lists.pins.items():
        for pin in pins:
            owners[pin].append(name)
    problems += [Problem("is_pinned_twice", names[1], pin, names[0]) for pin, names in owners.items() if names[1:]]
    problems += [Problem("has_no_pin", "wheels.json", name) for name in lists.releases.keys() - owners.keys()]
    for name, pins in lists.pins.items():
        for pin in pins.values():
            problems += check_pin(name, pin, lists)
    if not problems:  # what needs what can be asked only of pins with metadata
        for name in INCLUDES.keys() - {"torch", "cuda"}:
            problems += check_needs(name, lists)
        needed = set().union(*lists.wanted.values())
        problems += [Problem("is_needed_by_nothing", owners[pin][0], pin) for pin in sorted(owners.keys() - needed)]
    return problems


def check_pin(name: str, pin: Pin, lists: Lists) -> Iterator[Problem]:
    """Every promised Python and machine has a file of this pin, which allows that Python."""
    release = lists.releases.get(pin.name)
    if release is None or release.version != pin.version:
        yield Problem("has_no_metadata", name, pin.name, f"of {pin.version} in wheels.json")
        return
    if release.hashes() != pin.hashes:
        yield Problem("has_other_hashes", name, pin.name, "than wheels.json")
    for env in filter(pin.applies, lists.project.environments()):
        builds = release.builds_for(env)
        if not builds:
            yield Problem("has_no_wheel", name, pin.name, f"of {pin.version} for {env}")
        for build in builds:
            if python := refused(build.requires_python, env, lists.project.promised):
                detail = f"{python}: {pin.version} wants {build.requires_python}"
                yield Problem("refuses_python", name, pin.name, detail)
                break
        if name != "all" and not all(file.endswith(".whl") for build in builds for file in build.files):
            yield Problem("is_built_from_source", name, pin.name)


def check_needs(name: str, lists: Lists) -> Iterator[Problem]:
    """What pyproject.toml and each pin require is pinned in the list, at a version that satisfies them."""
    pins = lists.closure(name)
    for env in lists.project.environments():
        wanted: set[str] = set()
        for by, need in needs(lists.roots(name), pins, lists.releases, env):
            pin = pins.get(canonicalize_name(need.name))
            if pin is None or not pin.applies(env):
                yield Problem("lacks", name, by, f"{need}, for {env}")
                continue
            wanted.add(pin.name)
            if not need.specifier.contains(pin.version, prereleases=True):
                yield Problem("wants_another", name, by, f"{need}, and {pin.version} is pinned")
        lists.wanted[name, env] = wanted


def needs(
    roots: Iterable[Requirement], pins: Mapping[str, object], releases: Mapping[str, Release], env: Environment
) -> Iterator[tuple[str, Requirement]]:
    """Each requirement that holds in this environment, and who has it: roots, then pins that those need, and so on."""
    todo = [("pyproject.toml", root) for root in roots if root.marker is None or root.marker.evaluate(env.markers())]
    seen = set()
    while todo:
        by, need = todo.pop()
        if (by, str(need)) in seen:
            continue
        seen.add((by, str(need)))
        yield by, need
        name = canonicalize_name(need.name)
        if name not in pins or name not in releases:
            continue
        extras = frozenset(need.extras)
        todo += [
            (name, one) for build in releases[name].builds_for(env) for one in holding(build.requires, env, extras)
        ]


@cache
def holding(lines: tuple[str, ...], env: Environment, extras: frozenset[str]) -> list[Requirement]:
    """Those of a package's requirements that hold in this environment, with these extras of the package."""
    places = [{**env.markers(), "extra": extra} for extra in ("", *extras)]
    needs = map(Requirement, lines)
    return [need for need in needs if need.marker is None or any(map(need.marker.evaluate, places))]


def download_size(pins: Iterable[Pin], releases: Mapping[str, Release], env: Environment) -> int:
    """Bytes, of the largest file that fits: an index may have several builds."""
    files = (
        [size for b in releases[p.name].builds for f, (_, size) in b.files.items() if fits(f, env)]
        for p in pins
        if p.applies(env)
    )
    return sum(max(sizes) for sizes in files if sizes)
