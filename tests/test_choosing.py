"""What `pmtrain init` chooses for 60 groups, held against every recipe on every number of stages, one after another.

What it refuses comes with suggestions; each of them, typed as it stands, must then work.
"""

from __future__ import annotations

import json
import random
import re
from itertools import product
from pathlib import Path

import pytest
from tiers import first
from typer.testing import CliRunner

from protomodels_cli.cli.init_shape import shape_of
from protomodels_cli.cli.known_cards import card_named
from protomodels_cli.cli.line import line_of
from protomodels_cli.cli.main import app
from protomodels_cli.cli.run_plan import candidates, cut_for
from protomodels_cli.cost.forecast import estimate
from protomodels_cli.cost.sizes import ModelSize, dense_model
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.errors import EXIT_SPEC
from protomodels_cli.spec import load_spec
from protomodels_cli.spec.cut import cut_evenly, layers_per_stage
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import LinkSpec, RunSpec

CARDS = ["RTX 3060", "RTX 3070", "4060 Ti 16", "RTX 3090", "RTX 4090", "A100 80"]
LINES = ["2mbit,40ms", "10mbit,25ms", "20mbit", "80mbit,25ms", "300mbit,10ms"]
SIZES = ["10M", "124M", "350M", "1.3B", "3B", "7B"]
PEERS = [2, 3, 4, 6, 8, 12]
YEAR = 365 * 86_400

# Of docs/benchmarks.md, "Loss at a larger size": above dense, by form, one number in so many, codec.
LOSSES = {
    ("dense", 1, "bf16"): 0.0,
    ("dense", 1, "int8"): 0.0,
    ("dense", 1, "eden:4"): 0.010,
    ("two_stream", 8, "int8"): 0.0,
    ("two_stream", 6, "eden:6"): 0.0,
    ("two_stream", 15, "eden:3 then eden:5"): 0.008,
    ("two_stream", 32, "int8"): 0.020,
    ("reparam", 8, "int8"): 0.122,
}
# "Whether the gap grows with the model": in segments of one layer.
SINGLE = {("two_stream", 6, "eden:6"): 0.020, ("two_stream", 15, "eden:3 then eden:5"): 0.048}

_ALL = list(product(CARDS, LINES, SIZES, PEERS))
GROUPS = [
    ("RTX 3090", "20mbit", "124M", 4),
    ("RTX 3060", "2mbit,40ms", "350M", 3),
    ("RTX 3070", "80mbit,25ms", "1.3B", 2),
    *random.Random(33).sample(_ALL, 57),
]


def loss_of(spec: RunSpec) -> float | None:
    share = spec.model.width // spec.subspace.k if spec.form.has_basis else 1
    alone = spec.has_segments and min(spec.layers_per_segment) < 2
    for (form, most, codec), loss in (SINGLE if alone else LOSSES).items():
        k = max(1, spec.model.width // most)
        if (form, codec) == (spec.subspace.form, spec.wire.forward) and k == (spec.subspace.k if share > 1 else k):
            return loss
    return None


def seconds_each(spec: RunSpec, step: float, loss: float) -> float:
    """To dense's loss, for each token and parameter: 1 % of loss takes 10 % more steps."""
    dense = ModelSize.of(dense_model(spec))
    return (
        step * (1 + loss) ** 10 / spec.batch.size / spec.model.context / (dense.blocks + dense.embedding + dense.head)
    )


def at_least(spec: RunSpec, stages: int, link: LinkSpec, speed: float) -> float:
    """Seconds of a step, whatever it waits for: all that is computed, evenly shared; all that a middle line carries."""
    tokens = spec.batch.size * spec.model.context
    sent = sum(boundary_bytes(spec).values()) if stages > 2 else max(boundary_bytes(spec).values())
    line = 8 * sent * tokens / link.bits_per_second if stages > 1 else 0.0
    return max(line, tokens * sum(unit_flops(spec).values()) / stages / speed)


def every_way(written: RunSpec, size: float, peers: int) -> list[tuple[int, RunSpec]]:
    """The same run on every number of stages, evenly cut, with all that was measured, and with less memory."""
    found = []
    for stages in range(1, peers + 1):
        shape = shape_of(size, stages, written.vocab_size)
        data = written.model_dump(mode="json")
        model = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "kv_heads": shape.kv_heads}
        data["model"] |= {**model, "hidden": "auto", "dense_hidden": None, "head_dim": None, "segments": None}
        data["subspace"] = {"form": "dense"}
        data["wire"] |= {"forward": "bf16", "backward": "bf16"}
        data["groups"] = {}
        windows = written.batch.size // written.batch.microbatches
        microbatches = written.batch.microbatches
        while microbatches < 4 * stages:
            microbatches *= 2
        data["batch"] |= {"size": windows * microbatches, "microbatches": microbatches}
        for thrift in ({}, {"tables": "row_adamw", "moments": "bf16"}):
            cut = cut_evenly(spec_from(data | {"stages": 1}), stages)
            base = spec_from(data | {"stages": cut, "optimizer": data["optimizer"] | thrift})
            found += [(stages, spec) for spec in candidates(base)]
    return found


def asked(card: str, line: str, size: str, peers: int, folder: Path, *more: str) -> list[str]:
    words = ["--card", card, "--link", line, "--size", size, "--peers", str(peers), *more]
    return ["init", str(folder / "run.yaml"), "--yes", "--force", "--format", "json", *words]


def check_suggestions(said: str, card: str, line: str, size: str, peers: int, folder: Path) -> None:
    fix = said.split("fix:")[1]
    ways = re.findall(r"(--\w+) (\S+?)(?=[ ,]*(?:\(|with|on|$|--))", fix.strip())
    assert ways, said
    for option, value in ways:
        done = CliRunner().invoke(app, [*asked(card, line, size, peers, folder), option, value])
        assert done.exit_code == 0, (option, value, str(done.exception))


@pytest.mark.parametrize(("card", "line", "size", "peers"), first(3, GROUPS))
def test_the_choice_is_measured_fits_and_is_at_denses_loss_about_as_soon_as_any(card, line, size, peers, tmp_path):
    done = CliRunner().invoke(app, asked(card, line, size, peers, tmp_path))
    if done.exit_code:
        assert done.exception.exit_code == EXIT_SPEC
        assert done.exception.kind in ("does_not_fit", "takes_too_long")
        check_suggestions(str(done.exception), card, line, size, peers, tmp_path)
        return
    told = json.loads(done.stdout)
    memory, speed, link = int(card_named(card).memory * 2**30), card_named(card).speed, line_of(line)
    spec = cut_for(load_spec(tmp_path / "run.yaml"), memory=memory)
    stages = len(layers_per_stage(spec))
    assert stages == told["peers"] - told["spares"] <= peers
    predicted = estimate(spec, link, speed, memory=memory)
    assert max(stage.memory for stage in predicted.stages) <= memory
    assert spec.steps * predicted.step_seconds == pytest.approx(told["outlook"]["seconds"])
    assert told["outlook"]["seconds"] <= YEAR
    assert told["outlook"]["daily"]["upload_bytes"] <= link.bits_per_second / 8 * 86_400
    loss = loss_of(spec)
    assert loss is not None
    assert told["chosen"]["expected_loss"] == loss
    chosen = seconds_each(spec, predicted.step_seconds, loss)
    number = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    for others, way in every_way(spec, number, peers):
        cost = loss_of(way)
        if cost is None or seconds_each(way, at_least(way, others, link, speed), cost) * 1.1 >= chosen:
            continue  # it cannot be sooner by a tenth
        found = estimate(way, link, speed, memory=memory)
        if max(stage.memory for stage in found.stages) <= memory:
            best = seconds_each(way, found.step_seconds, cost)
            assert chosen <= 1.1 * best, (others, way.subspace.form, way.subspace.k, way.wire.forward)
