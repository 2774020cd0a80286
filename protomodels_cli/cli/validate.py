"""`pmtrain validate SPEC …`: every mistake in a spec at once, or what the spec would train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from protomodels_cli.cli.completing import spec_files
from protomodels_cli.cli.output import FormatOption, print_json
from protomodels_cli.errors import EXIT_SPEC


def validate(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC", help="Spec files.", autocompletion=spec_files)],
    output: FormatOption = "text",
) -> None:
    """Check run specs; print every mistake with its line, rule and fix."""
    from protomodels_cli.spec import SpecError, load_spec

    results: list[dict[str, Any]] = []
    for path in specs:
        try:
            spec = load_spec(path)
        except SpecError as e:
            results.append({"file": str(path), "ok": False, "problems": [vars(p) for p in e.problems]})
            if output == "text":
                print(e, file=sys.stderr)
        else:
            results.append({"file": str(path), "ok": True, **_summary(spec)})
            if output == "text":
                print(f"{path}: ok, {_sentence(spec)}{_reading(spec, path.parent)}")
    if output == "json":
        print_json({"files": results})
    bad = [r for r in results if not r["ok"]]
    if bad:
        if output == "text":
            from protomodels_cli.quantities import plural

            problems = sum(len(r["problems"]) for r in bad)
            print(
                f"{plural(problems, 'problem')} in {len(bad)} of {plural(len(results), 'file')}",
                file=sys.stderr,
            )
        raise typer.Exit(EXIT_SPEC)


def _summary(spec: Any) -> dict[str, Any]:
    from protomodels_cli.cost.traffic import boundary_bytes
    from protomodels_cli.cost.units import stage_parameters, t_fixed_bytes
    from protomodels_cli.spec.cut import layers_per_stage

    return {
        "sha256": spec.sha256(),
        "layers_per_stage": layers_per_stage(spec),
        "parameters_per_stage": stage_parameters(spec),
        "t_fixed_bytes_per_stage": t_fixed_bytes(spec),
        "boundary_bytes_per_token": boundary_bytes(spec),
    }


def _reading(spec: Any, base: Path) -> str:
    """Where the data are read so often that it has to be said."""
    from protomodels_cli.cli.outlook import reading, reading_in_words
    from protomodels_cli.data.amount import ENOUGH

    found = reading(spec, base)
    return f"; {reading_in_words(found, spec)}" if (found.epochs or 0.0) > ENOUGH else ""


def _sentence(spec: Any) -> str:
    from protomodels_cli.quantities import count, figures, plural, size

    s = _summary(spec)
    sent = s["boundary_bytes_per_token"]
    ratio = 2 * sent["dense_bf16_each_way"] / (sent["forward"] + sent["backward"])
    against = f"{figures(ratio)}× less than" if ratio > 1 else f"{figures(1 / ratio)}× as much as"
    stages = (
        "stages cut when peers have joined" if spec.stages == "auto" else plural(len(s["layers_per_stage"]), "stage")
    )
    return (
        f"{spec.subspace.form}, {count(sum(s['parameters_per_stage']))} parameters "
        f"in {spec.model.layers} layers, {stages}; "
        f"{figures(sent['forward'])} + {figures(sent['backward'])} bytes per token over a boundary "
        f"({against} dense bf16), T_fixed {size(s['t_fixed_bytes_per_stage'])}"
    )
