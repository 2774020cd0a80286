"""How much memory an export takes beyond what importing torch takes, in a process of its own.

.venv/bin/python tests/export_memory.py FOLDER WIDTH LAYERS HIDDEN VOCABULARY       random weights, reparam, 4 stages
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import yaml

from protomodels_cli.export.source import open_source
from protomodels_cli.export.weights import slices_of, stage_shapes
from protomodels_cli.export.write import export
from protomodels_cli.files import hash_file
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.llama import Section, StageModules
from protomodels_cli.model.shape import Shape
from protomodels_cli.observe.process import peak_memory
from protomodels_cli.protocol.basis import initial_u
from protomodels_cli.safetensors_file import write_safetensors
from protomodels_cli.spec import RunSpec, spec_from
from protomodels_cli.spec.cut import layers_per_stage


def a_spec(width: int, layers: int, hidden: int, vocabulary: int) -> RunSpec:
    return spec_from(
        {
            "steps": 1,
            "stages": 4,
            "model": {"layers": layers, "width": width, "heads": width // 64, "hidden": hidden},
            "subspace": {"form": "reparam", "k": width // 32},
            "data": {"source": "bin", "files": ["ids.bin"]},
            "tokenizer": {"kind": "none", "vocab_size": vocabulary},
        }
    )


def write_run(folder: Path, spec: RunSpec) -> None:
    """As the reference leaves it, one tensor in memory at a time."""
    snapshot = folder / "snapshots" / "00000001"
    snapshot.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    u = initial_u(spec.model.width, spec.subspace.k, 0, "float32")
    hashes, random = {}, np.random.default_rng(0)
    for slice_ in slices_of(tuple(layers_per_stage(spec))):
        section = Section(torch.device("meta"), slice_.layers, spec.form(Basis(0, torch.from_numpy(u))))
        modules = StageModules(Shape.of(spec), slice_, section)
        shapes = {f"weights/{name}": tuple(p.shape) for name, p in modules.named_parameters()}

        def content(name: str, shapes: dict[str, tuple[int, ...]] = shapes) -> memoryview:
            if name.startswith("basis/"):
                return u.data if name == "basis/u" else np.zeros((), "<i8").reshape(-1).data
            return random.standard_normal(shapes[name], dtype=np.float32).data

        path = snapshot / f"stage-{slice_.index}.safetensors"
        tensors = [(name, "F32", shape) for name, shape in shapes.items()]
        write_safetensors(path, [*tensors, ("basis/u", "F32", u.shape), ("basis/version", "I64", ())], content)
        hashes[path.name] = hash_file(path)
    (snapshot / "hashes.json").write_text(json.dumps({"step": 1, "sha256": hashes}))


def stage_bytes(spec: RunSpec) -> list[int]:
    """Of the exported weights, in float32."""
    shapes = stage_shapes(spec, tuple(layers_per_stage(spec)))
    return [sum(4 * int(np.prod(weight.shape)) for weight in stage) for stage in shapes]


def main(folder: Path, *sizes: int) -> None:
    spec = a_spec(*sizes)
    if not folder.exists():  # made by one process, measured by another: making it takes memory too
        write_run(folder, spec)
        return
    before, started = peak_memory(), time.monotonic()
    with open_source(folder) as source:
        export(source, folder / "out")
    taken, largest = peak_memory() - before, max(stage_bytes(spec))
    figures = {
        "parameters": sum(stage_bytes(spec)) // 4,
        "largest_stage_bytes": largest,
        "peak_bytes_beyond_imports": taken,
        "ratio": taken / largest,
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
