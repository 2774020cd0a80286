"""A module that is imported when it is first used, so that what needs no tensors works where torch is missing.

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


class _LazyModule:
    """Stands in a module's namespace until it is used, then gives its place to what it stands for."""

    __slots__ = ("_name", "_namespace")

    def __init__(self, name: str, namespace: dict[str, Any]):
        self._name, self._namespace = name, namespace

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self._name)
        for name in [name for name, value in self._namespace.items() if value is self]:
            self._namespace[name] = module
        return getattr(module, attribute)

    def __repr__(self) -> str:
        return f"<module {self._name!r}, imported when used>"


def lazy_import(name: str) -> Any:
    """To be called by the module whose name for it is used."""
    return _LazyModule(name, sys._getframe(1).f_globals)


def resolve(namespace: dict[str, Any]) -> None:
    """Import what stands there lazily: torch's compiler does not see through it."""
    for value in list(namespace.values()):
        if isinstance(value, _LazyModule):
            _ = value.__name__
