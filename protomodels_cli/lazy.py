"""A module that is imported when it is first used, so that what needs no tensors works where torch is missing.

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")
"""

from __future__ import annotations

import importlib
from typing import Any


class _LazyModule:
    __slots__ = ("_name",)

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"<module {self._name!r}, imported when used>"


def lazy_import(name: str) -> Any:
    return _LazyModule(name)
