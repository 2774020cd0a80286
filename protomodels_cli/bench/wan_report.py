"""What `bench wan` found, in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protomodels_cli.observe.pictures import figure, save_figure


def in_words(found: dict[str, Any]) -> str:
    s = found["setting"]
    where = "between hosts, over real TCP" if s["via"] == "hosts" else "with the link emulated in the transport"
    model, batch = s["model"], s["batch"]
    lines = [
        f"{s['stages']} stages, width {model['width']}, {model['layers']} layers, {s['tokens_per_step']} tokens a step "
        f"in {batch['microbatches']} microbatches, {s['compute_dtype']}, {s['cores']} cores; {where}",
        "",
        f"{'':42}{'tokens/s':>9}{'bytes/token':>13}{'vs bf16':>9}{'vs fp32':>9}{'of own':>8}{'of bound':>9}"
        f"{'predicted':>11}",
    ]
    for row in found["rows"]:
        name = f"{name_of(row)} over {row['link']}"
        lines.append(
            f"{name:42}{row['tokens_per_s']:9.0f}{row['bytes_per_token']:13.1f}{row['ratio_bf16']:8.1f}×"
            f"{row['ratio_fp32']:8.1f}×{row['of_unshaped']:8.2f}{row['efficiency']:9.2f}"
            f"{row['predicted_over_measured']:10.2f}×"
        )
    for row in found["torch_pipelining"]:
        name = f"torch {row['codec']} ({row['schedule']}) over {row['link']}"
        own = row["tokens_per_s"] / row["bound_compute"]
        blank = " " * 18
        lines.append(
            f"{name:42}{row['tokens_per_s']:9.0f}{row['bytes_per_token']:13.1f}{blank}{own:8.2f}{row['efficiency']:9.2f}"
        )
    lines += [
        "",
        "of own: of its speed without a link; of bound: of that or of bytes over bandwidth, whichever is less;",
    ]
    lines += [
        "predicted: the step time by the forecast of `pmtrain plan`, over the measured one; its speed is taken from"
    ]
    lines += ["the same method's run without a link, its peers share this machine's cores"]
    if found["speedup"]:
        lines += ["", "against torch.distributed.pipelining (its better schedule) on the same link:"]
    for row in found["speedup"]:
        name = f"{name_of(row)} over {row['link']}"
        lines.append(f"{name:42}{row['over_torch_fp32']:8.2f}× its fp32 {row['over_torch_bf16']:8.2f}× its bf16")
    return "\n".join(lines)


def name_of(row: dict[str, Any]) -> str:
    return f"{row['form']} {row['codec']}" if row["k"] is None else f"{row['form']} k={row['k']} {row['codec']}"


def plot(found: dict[str, Any], path: Path) -> None:
    rows = found["rows"] + [{**r, "k": None, "form": "torch"} for r in found["torch_pipelining"]]
    links, names = list(dict.fromkeys(r["link"] for r in rows)), list(dict.fromkeys(name_of(r) for r in rows))
    fig, [ax] = figure(1, 1, f"Speed over a slow link, {found['setting']['stages']} stages")
    fig.set_size_inches(9, 4)
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        found_rows = {r["link"]: r for r in rows if name_of(r) == name}
        at = [i + (n - (len(names) - 1) / 2) * width for i in range(len(links))]
        heights = [found_rows[link]["tokens_per_s"] if link in found_rows else 0 for link in links]
        ax.bar(at, heights, width * 0.9, label=name, hatch="//" if name.startswith("torch") else None)
        for x, link in zip(at, links, strict=True):
            bound = found_rows.get(link, {}).get("bound_wire")
            if bound and bound < max(r["tokens_per_s"] for r in rows):
                ax.plot([x - width / 2, x + width / 2], [bound, bound], color="black", lw=1.2)
    ax.set_xticks(range(len(links)), ["no link" if link == "none" else link for link in links])
    ax.set_ylabel("tokens/s (black: bytes over bandwidth)")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    save_figure(fig, path)
