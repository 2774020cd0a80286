"""Registries of interchangeable techniques: those built in, and those that installed packages add by entry points.

A package elsewhere names its class in an entry point of the group. A spec, which comes over the network to a peer, can
only choose among what is installed: no module is ever imported because a spec names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from protomodels_cli.errors import UserError

T = TypeVar("T")


class UnknownName(ValueError):
    """Nothing with this name is built in or installed."""


class Registry(Generic[T]):
    def __init__(self, group: str, is_one: Callable[[Any], bool], builtin: Mapping[str, T]):
        """`group`: of the entry points; `is_one` says whether what one loads belongs here."""
        self.group, self._is_one = group, is_one
        self.builtin = dict(builtin)
        self._loaded = dict(builtin)

    @property
    def names(self) -> list[str]:
        """Built-in ones first, then the others by name."""
        return [*self.builtin, *sorted(self._installed)]

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if point.name in self.builtin or point.name in found:
                other = self._described(found[point.name]) if point.name in found else "one of pmtrain's own"
                raise UserError(
                    f"{self._described(point)} has the same name as {other}",
                    "uninstall one of the packages, or rename the entry point: a name must mean the same to every peer",
                    "plugin_name_taken",
                )
            found[point.name] = point
        return found

    def package_of(self, name: str) -> str | None:
        """The package that adds this name here, with its version; None: no package does."""
        return _package(self._installed[name]) if name in self._installed else None

    def add(self, name: str, one: T) -> None:
        """For an experiment's own, which only this process is to know."""
        self._loaded[name] = one

    def get(self, name: str) -> T:
        if name not in self._loaded:
            if name not in self._installed:
                raise UnknownName(name)
            self._loaded[name] = self._load(self._installed[name])
        return self._loaded[name]

    def _load(self, point: EntryPoint) -> T:
        package = point.dist.name if point.dist else point.value
        fix = f"repair {package}, or remove it with: pip uninstall {package}"
        try:
            loaded = point.load()
        except Exception as e:  # whatever a package elsewhere does on import
            raise UserError(f"{self._described(point)} cannot be loaded: {e!r}", fix, "plugin_broken") from e
        if not self._is_one(loaded) or getattr(loaded, "name", None) != point.name:
            what = f"{self._described(point)} loads {loaded!r}, which is not a {self.group} plug-in of that name"
            raise UserError(what, fix, "plugin_wrong")
        one: T = loaded
        return one

    def _described(self, point: EntryPoint) -> str:
        return f"{point.name!r} of {_package(point)} (entry point {point.value} in {self.group})"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
