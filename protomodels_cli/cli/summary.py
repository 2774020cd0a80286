"""The summary of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protomodels_cli.quantities import duration, rate, size


def read_summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text(encoding="utf-8")))


def in_words(s: dict[str, Any]) -> str:
    cut = "+".join(map(str, s["layers_per_stage"]))
    lines = [
        f"done: loss {float(s['loss_first']):.4f} → {float(s['loss_last']):.4f}, "
        f"held-out {float(s['eval_loss']):.4f}; "
        f"{s['steps']} steps over {s['stages']} stages ({cut} layers) in {duration(s['seconds'])}, "
        f"{rate(s['tokens_per_s'], 'tok/s')}"
    ]
    if s["ratio_bf16"] is not None:
        each = s["bytes_per_token"]
        lines.append(
            f"sent between stages: {size(s['bytes_sent'])}, {each['forward']:.1f} bytes per token forward and "
            f"{each['backward']:.1f} backward over each boundary; a dense pipeline would send "
            f"{size(s['dense_bytes_bf16'])} in bfloat16 ({s['ratio_bf16']:.1f} ×) or "
            f"{size(2 * s['dense_bytes_bf16'])} in float32 ({s['ratio_fp32']:.1f} ×)"
        )
    lines.append(f"weights sha256 {s['weights_sha256']}")
    return "\n".join(lines)
