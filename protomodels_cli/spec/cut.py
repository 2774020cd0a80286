"""Where the model is cut: layers per stage."""

from __future__ import annotations

from protomodels_cli.spec.schema import RunSpec


def even_cut(layers: int, stages: int) -> list[int]:
    """Layers per stage, as even as possible. Earlier stages take the remainder: the last one has the head."""
    base, rest = divmod(layers, stages)
    return [base + (i < rest) for i in range(stages)]


def layers_per_stage(spec: RunSpec) -> list[int]:
    """The cut a spec asks for. `auto` is one stage until peers have joined and been measured."""
    if isinstance(spec.stages, list):
        return list(spec.stages)
    return even_cut(spec.model.layers, 1 if spec.stages == "auto" else spec.stages)
