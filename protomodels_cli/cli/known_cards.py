"""GPUs by their names: memory, speed and power, so that nobody has to look them up. Pure.

Memory and power are those of the maker's page for each card; power is what the board may take. `peak` is dense bf16
with sums in float32, as pmtrain computes. GeForce: appendices of NVIDIA's GA102, Ada and Blackwell whitepapers, where
sums in float32 have half the rate of sums in float16. RTX A, L and datacentre cards: datasheets, without sparsity.
Apple's are float32: press releases for M1 and M2, cores × 256 × clock for the others; pmtrain was not tried on them.

Nobody reaches the peak: on an H200 plain torch trained at 0.52 of it and eight stages at 0.46 (docs/benchmarks.md,
"Measured on an H200"). Half of it is reckoned with. The driver and a screen keep a part of the memory.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from protomodels_cli.errors import OptionError

REACHED = 0.5  # of the peak
KEPT = 1.0  # GiB that the driver and a screen take
SHARED = 0.67  # of an Apple chip's memory that its GPU may use by default


@dataclass(frozen=True)
class Card:
    name: str
    gib: float
    peak: float  # TFLOP/s
    watts: float
    apple: bool = False

    @property
    def memory(self) -> float:
        """GiB that a stage may take."""
        return round(self.gib * SHARED, 1) if self.apple else self.gib - KEPT

    @property
    def speed(self) -> float:
        """Operations a second, as they are reckoned with."""
        return REACHED * self.peak * 1e12


CARDS = (
    Card("RTX 3060", 12, 25.5, 170),
    Card("RTX 3060 Ti", 8, 32.4, 200),
    Card("RTX 3070", 8, 40.6, 220),
    Card("RTX 3070 Ti", 8, 43.5, 290),
    Card("RTX 3080", 10, 59.5, 320),
    Card("RTX 3080 12", 12, 61.3, 350),
    Card("RTX 3080 Ti", 12, 68.2, 350),
    Card("RTX 3090", 24, 71.0, 350),
    Card("RTX 3090 Ti", 24, 80.0, 450),
    Card("RTX 4060", 8, 30.2, 115),
    Card("RTX 4060 Ti", 8, 44.1, 160),
    Card("RTX 4060 Ti 16", 16, 44.1, 165),
    Card("RTX 4070", 12, 58.3, 200),
    Card("RTX 4070 Super", 12, 71.0, 220),
    Card("RTX 4070 Ti", 12, 80.2, 285),
    Card("RTX 4070 Ti Super", 16, 88.2, 285),
    Card("RTX 4080", 16, 97.5, 320),
    Card("RTX 4080 Super", 16, 104.4, 320),
    Card("RTX 4090", 24, 165.2, 450),
    Card("RTX 5060 Ti 16", 16, 47.4, 180),
    Card("RTX 5070", 12, 61.7, 250),
    Card("RTX 5070 Ti", 16, 87.9, 300),
    Card("RTX 5080", 16, 112.6, 360),
    Card("RTX 5090", 32, 209.5, 575),
    Card("A4000", 16, 76.7, 140),
    Card("A5000", 24, 111.1, 230),
    Card("A6000", 48, 154.8, 300),
    Card("A10", 24, 125.0, 150),
    Card("L4", 24, 121.0, 72),
    Card("L40S", 48, 362.0, 350),
    Card("A100", 40, 312.0, 400),
    Card("A100 80", 80, 312.0, 400),
    Card("H100", 80, 989.0, 700),
    Card("H100 PCIe", 80, 756.0, 350),
    Card("H200", 141, 989.0, 700),
    Card("M1", 16, 2.6, 20, apple=True),
    Card("M1 Pro", 16, 5.2, 40, apple=True),
    Card("M1 Max", 32, 10.4, 60, apple=True),
    Card("M2", 16, 3.6, 20, apple=True),
    Card("M2 Pro", 16, 6.8, 40, apple=True),
    Card("M2 Max", 32, 13.6, 60, apple=True),
    Card("M3", 16, 3.5, 20, apple=True),
    Card("M3 Pro", 18, 6.4, 40, apple=True),
    Card("M3 Max", 36, 14.1, 60, apple=True),
)


def card_named(text: str) -> Card:
    """As people write it: "RTX 3090", "NVIDIA GeForce RTX 3090", 4060ti-16gb, "a100 80 GB"."""
    wanted = _plain(text)
    by_name = {_plain(card.name): card for card in CARDS}
    by_name |= {f"{plain}{card.gib:g}": card for plain, card in by_name.items()}  # "RTX 3090 24GB"
    if wanted in by_name:
        return by_name[wanted]
    near = difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.5)
    known = by_name[near[0]].name if near else "RTX 3090"
    raise OptionError(
        f"--card {text}: no card of this name is known ({', '.join(card.name for card in CARDS)})",
        f"did you mean {known!r}? Or say --memory (GiB) and --speed (as 30tflops) in its place",
        "card",
    )


def _plain(text: str) -> str:
    text = re.sub(r"\b(nvidia|geforce|rtx|tesla|apple|sxm\d?)\b|(?<=\d) *gi?b\b", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", text.replace("rtx", ""))
