"""Makes the lists in requirements/ and their metadata from pyproject.toml, with pip and the indexes that it knows.

    scripts/pins.sh                     checks the lists; asks no index
    scripts/pins.sh refresh             makes them again; pinned packages keep their version
    scripts/pins.sh refresh numpy rich  … but these take the newest version that every promised Python can install
    scripts/pins.sh refresh --all       … but all do

pip resolves for the Python that runs this. A version that another promised Python or machine cannot install is ruled
out, a package that only those need is added, and pip resolves again. Files that an index had at an earlier refresh keep
their hash, because not every index has the CPU builds of torch.
"""

from __future__ import annotations

import email
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pins
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from pins import INCLUDES, Build, Environment, Pin, Project, Release

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
HEADS = {
    "pip": "pip itself: those that Pythons bring along are of any age.",
    "coordinator": "What leads a run: no torch. It has setuptools too, with which pmtrain itself is installed.",
    "torch": "torch, in every build that an index had. Builds with CUDA need cuda.txt as well.",
    "cuda": "What the CUDA builds of torch need on Linux. scripts/setup.sh installs it where torch asks for it.",
    "peer": "pmtrain's dependencies: all that joining a run needs.",
    "user": "What scripts/setup.sh installs: a peer's packages, and those of the lab's plots.",
    "test": "What scripts/test.sh needs.",
    "all": "What scripts/test.sh --all and scripts/site.sh need: large packages that few tests use.",
}
LINUX = Marker('sys_platform == "linux"')


class Index:
    """pip's own view of its indexes and folders of wheels: pip has no public way to list all files of a version."""

    def __init__(self) -> None:
        from pip._internal.commands import create_command

        command: Any = create_command("install")
        options, _ = command.parse_args([])
        self._session = command._build_session(options)
        self._collector = command._build_package_finder(options, self._session)._link_collector
        self._links: dict[str, dict[str, list[Any]]] = {}

    def links(self, name: str) -> dict[str, list[Any]]:
        """pip's links to the files of a package, by public version."""
        from pip._internal.index.collector import parse_links

        if name not in self._links:
            found: list[Any] = []

            def read(page: Any) -> list[Any]:
                response = self._collector.fetch_response(page)
                found.extend(parse_links(response) if response else ())
                return []

            for source in filter(None, itertools.chain(*self._collector.collect_sources(name, read))):
                found += [*source.page_candidates()]  # always empty: `read` keeps the links itself
                found += source.file_links()
            versions = defaultdict(list)
            for link in found:
                if (version := version_of(link.filename, name)) and not link.is_yanked:
                    versions[version.public].append(link)
            self._links[name] = versions
        return self._links[name]

    def read(self, link: Any) -> tuple[Any, str, int]:
        """Metadata, sha256 and size of a wheel. Only the part with the metadata is fetched."""
        from pip._internal.network.lazy_wheel import LazyZipOverHTTP

        if link.is_file:
            with open(link.file_path, "rb") as wheel:
                sha256 = hashlib.file_digest(wheel, "sha256").hexdigest()
                assert link.hash in (None, sha256), link
                return metadata_in(wheel), sha256, wheel.seek(0, 2)
        with LazyZipOverHTTP(link.url_without_fragment, self._session) as remote:
            metadata = metadata_in(remote)  # type: ignore[arg-type]
            remote.seek(0, 2)
            assert link.hash_name == "sha256", link
            return metadata, link.hash, remote.tell()

    def source_archive(self, link: Any) -> tuple[str, int]:
        if link.is_file:
            data = Path(link.file_path).read_bytes()
        else:
            response = self._session.get(link.url_without_fragment)
            response.raise_for_status()
            data = response.content
        return hashlib.sha256(data).hexdigest(), len(data)


def version_of(file: str, name: str) -> Version | None:
    """None for another package's file, and for files with names of old."""
    try:
        found = parse_wheel_filename(file)[:2] if file.endswith(".whl") else parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return found[1] if found[0] == name else None


def metadata_in(wheel: IO[bytes]) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        [file] = [f for f in archive.namelist() if f.endswith(".dist-info/METADATA") and f.count("/") == 1]
        return email.message_from_bytes(archive.read(file))


def resolve(wanted: Iterable[str], constraints: Iterable[str]) -> dict[str, dict[str, Any]]:
    """pip's own choice: its report's metadata by name. Nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("wanted", "constraints", "report")]
        files[0].write_text("\n".join(wanted))
        files[1].write_text("\n".join(constraints))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--use-feature=fast-deps", "-r", str(files[0]), "-c", str(files[1]), "--report", str(files[2])]
        subprocess.run(command, check=True)
        report = json.loads(files[2].read_text())
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in report["install"]}


def usable(file: str, environments: Iterable[Environment]) -> bool:
    return any(pins.fits(file, env) for env in environments)


def release_of(
    name: str, metadata: Mapping[str, Any], index: Index, old: Release | None, environments: list[Environment]
) -> Release:
    """All wheels of a version that a promised Python can install, in groups of equal metadata; older ones are kept."""
    version = Version(metadata["version"]).public
    kept = {f: (b, row) for b in old.builds for f, row in b.files.items()} if old and old.version == version else {}
    links = {link.filename: link for link in index.links(name)[version]}
    wheels = [f for f in links if f.endswith(".whl") and usable(f, environments) and f not in kept]
    groups: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, int]]] = defaultdict(dict)
    for file, (build, row) in kept.items():
        groups[build.requires_python, build.requires][file] = row
    for file in wheels:
        found, sha256, size = index.read(links[file])
        requires = tuple(sorted(map(str, map(Requirement, found.get_all("Requires-Dist", ())))))
        groups[found.get("Requires-Python", ""), requires][file] = sha256, size
    if not groups:  # no wheels at all: the metadata is pip's, which has built it
        requires = tuple(sorted(metadata.get("requires_dist", ())))
        [archive] = links.values()
        groups[metadata.get("requires_python", ""), requires][archive.filename] = index.source_archive(archive)
    builds = (Build(python, needs, dict(sorted(files.items()))) for (python, needs), files in sorted(groups.items()))
    return Release(version, tuple(builds))


def newest_usable(name: str, index: Index, environments: list[Environment], promised: SpecifierSet) -> str:
    """By the indexes alone: the newest release that all of these can install."""

    def serves(links: list[Any], env: Environment) -> bool:
        refused = {link.filename for link in links if pins.refused(link.requires_python or "", env, promised)}
        wheels = {link.filename for link in links if link.filename.endswith(".whl")}
        return any(pins.fits(file, env) for file in wheels - refused)

    found = [
        version
        for version, links in index.links(name).items()
        if not Version(version).is_prerelease and all(serves(links, env) for env in environments)
    ]
    return max(found, key=Version)


def refresh(
    project: Project, old: Mapping[str, Release], freed: set[str]
) -> tuple[dict[str, list[Pin]], dict[str, Release]]:
    """The pins of each list, and the metadata of all."""
    index, environments = Index(), project.environments()
    constraints = {name: f"{name}=={release.version}" for name, release in old.items() if name not in freed}
    wanted = {str(root) for roots in project.roots.values() for root in roots}
    while True:
        say(f"pip resolves {len(wanted)} requirements …")
        chosen = resolve(sorted(wanted), sorted(constraints.values()))
        say(f"reading the metadata of {len(chosen)} packages …")
        with ThreadPoolExecutor(16) as pool:
            started = {
                name: pool.submit(release_of, name, metadata, index, old.get(name), environments)
                for name, metadata in chosen.items()
            }
        releases = {name: one.result() for name, one in started.items()}
        users, lacking = who_needs(project, releases)
        lists: dict[str, list[Pin]] = {name: [] for name in INCLUDES}
        ruled_out = {}
        for name in sorted(users):
            there = {env for _, env in users[name]}
            marker = None if any(env.system == "darwin" for env in there) else LINUX
            pin = Pin(name, releases[name].version, marker, frozenset(releases[name].hashes()))
            place = next(place for place in INCLUDES if any(place == user for user, _ in users[name]))
            lists[place].append(pin)
            found = pins.check_pin(place, pin, pins.Lists(project, {}, releases))
            if any(problem.kind in ("refuses_python", "has_no_wheel") for problem in found):
                ruled_out[name] = f"{name}=={newest_usable(name, index, [*there], project.promised)}"
                say(f"{name} {pin.version} cannot be installed everywhere; taking {ruled_out[name]}")
        if not lacking and not ruled_out:
            return lists, {name: releases[name] for name in sorted(users)}
        constraints |= ruled_out
        wanted |= lacking
        old = releases


def who_needs(
    project: Project, releases: dict[str, Release]
) -> tuple[dict[str, set[tuple[str, Environment]]], set[str]]:
    """Of each package the lists and environments that need it; and requirements that no package satisfies yet.

    torch.txt is torch alone, and cuda.txt what torch needs on Linux and not on macOS, where no build has CUDA.
    """
    users, lacking = defaultdict(set), set()
    tree = pins.Lists(project, {}, releases)
    on_macos: set[str] = set()
    for env in sorted(project.environments(), key=lambda env: env.system):
        for place in INCLUDES:
            for _, need in pins.needs(tree.roots(place), releases, releases, env):
                name = canonicalize_name(need.name)
                if name not in releases:
                    need.marker = None
                    lacking.add(str(need))
                elif place != "torch" or name == "torch":
                    users[name].add((place, env))
                elif env.system == "darwin":
                    on_macos.add(name)
                elif name not in on_macos:
                    users[name].add(("cuda", env))
    return users, lacking


def text_of(name: str, own: list[Pin], releases: Mapping[str, Release], env: Environment) -> str:
    size = pins.download_size(own, releases, env) / 1e6
    lines = [f"# {HEADS[name]}", "# Made by `scripts/pins.sh refresh`, which CONTRIBUTING.md explains."]
    lines += [f"# {len(own)} package{'s' * (len(own) != 1)}, up to {size:.0f} MB"]  # scripts/setup.sh says so
    lines += [f"-r {included}.txt" for included in INCLUDES[name]]
    for pin in own:
        line = f"{pin.name}=={pin.version}" + (f" ; {pin.marker}" if pin.marker else "")
        lines.append(" \\\n    ".join([line, *(f"--hash=sha256:{sha256}" for sha256 in sorted(pin.hashes))]))
    return "\n".join(lines) + "\n"


def json_of(releases: Mapping[str, Release]) -> str:
    table = {
        name: {
            "version": release.version,
            "builds": [
                {
                    "requires_python": build.requires_python,
                    "requires": build.requires,
                    "files": {file: {"sha256": sha256, "bytes": size} for file, (sha256, size) in build.files.items()},
                }
                for build in release.builds
            ],
        }
        for name, release in releases.items()
    }
    return json.dumps(table, indent=1) + "\n"


def say(text: str) -> None:
    print(text, file=sys.stderr)


def main(words: list[str]) -> int:
    pyproject = (ROOT / "pyproject.toml").read_text()
    kept = FOLDER / "wheels.json"
    if words[:1] == ["refresh"]:
        project = Project.read(pyproject)
        old = pins.read_releases(kept.read_text())
        freed = set(old) if "--all" in words else {canonicalize_name(word) for word in words[1:]}
        if freed - old.keys():
            say(f"{', '.join(sorted(freed - old.keys()))}: not pinned; requirements come from pyproject.toml")
            return 2
        lists, releases = refresh(project, old, freed)
        for name, own in lists.items():
            env = Environment(project.pythons[-1], "linux", "x86_64")
            (FOLDER / f"{name}.txt").write_text(text_of(name, own, releases, env))
        kept.write_text(json_of(releases))
        for name in sorted(old.keys() | releases.keys()):
            before, after = (table[name].version if name in table else "none" for table in (old, releases))
            if before != after:
                say(f"{name}: {before} → {after}")
    elif words:
        say(__doc__ or "")
        return 2
    problems = pins.check({f.stem: f.read_text() for f in FOLDER.glob("*.txt")}, kept.read_text(), pyproject)
    for problem in problems:
        say(str(problem))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
