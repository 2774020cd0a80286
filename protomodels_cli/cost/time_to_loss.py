"""How long a run takes to the loss that dense would reach: seconds a step, times the steps that it needs. Pure.

The exchange rate between loss and steps is one number. A way of crossing that was measured to end a share `loss` above
dense at equal tokens needs (1 + loss) ** EXPONENT times the steps to end level with it.

- The paper's own form with one number in 6.4 ends 12.2 % above dense here (docs/benchmarks.md, "Loss at a larger size":
  reparam, an eighth). Its authors needed 3.12 times dense's steps in their controlled pair (203 M parameters). That is
  an exponent of 9.9.
- Twice the tokens make 13 M tokens' loss 17 % lower here (2.031 → 1.698, d = 512): an exponent of 4. Twice again, with
  twice the width, 16 %, of which a doubled width has 7: up to 7. Later halvings cost more steps.
- Published scaling laws have 12 at 20 tokens for each parameter (Hoffmann et al. 2022), which `init` proposes.
"""

from __future__ import annotations

EXPONENT = 10.0


def times_the_steps(loss: float) -> float:
    """Of dense's steps that are needed with this loss above dense's; not fewer where it is below."""
    return (1.0 + max(0.0, loss)) ** EXPONENT


def seconds_to_loss(seconds: float, loss: float) -> float:
    """`seconds`: of as many steps as dense would take."""
    return seconds * times_the_steps(loss)
