"""What a spec uses of installed packages. Coordinator and peers must have the same version of each: two versions may
compute different numbers under one name."""

from __future__ import annotations

from typing import Any

from protomodels_cli.codecs.registry import names_in, registry
from protomodels_cli.forms import FORMS
from protomodels_cli.plugins import Registry
from protomodels_cli.spec.schema import RunSpec


def packages_used(spec: RunSpec) -> dict[str, str]:
    """By entry point (`pmtrain.codecs:NAME`), the package and version that adds it here. Not what is built in."""
    names = [(FORMS.group, spec.subspace.form)]
    names += [(registry().group, name) for leg in (spec.wire.forward, spec.wire.backward) for name in names_in(leg)]
    points = [f"{group}:{name}" for group, name in names]
    return {point: package for point in points if (package := package_here(point)) is not None}


def package_here(point: str) -> str | None:
    group, _, name = point.partition(":")
    groups: dict[str, Registry[Any]] = {FORMS.group: FORMS, registry().group: registry()}
    return groups[group].package_of(name) if group in groups else None
