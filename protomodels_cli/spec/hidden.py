"""`model.hidden: auto`: the hidden width with which a form's blocks have as many parameters as those of a dense model.

A form's writing matrices may have fewer or more columns than the stream, so that equal widths are not equal models.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from protomodels_cli.forms import Sizes
from protomodels_cli.spec.cut import closing_layers
from protomodels_cli.spec.fields import LARGEST

if TYPE_CHECKING:
    from protomodels_cli.spec.schema import RunSpec

_AUTO = re.compile(r"auto(?::([1-9]\d{0,8}))?")
WIDE = 256  # widths from this on get a hidden width that is a multiple of 32, others of 8


def usual_hidden(width: int) -> int:
    return -(-8 * width // 3 // 32) * 32


def is_hidden(value: Any) -> bool:
    """A width, or `auto` with or without one."""
    if isinstance(value, str) and (found := _AUTO.fullmatch(value)):
        value = int(found[1] or 1)
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def dense_hidden(spec: RunSpec) -> int | None:
    """The hidden width of the dense model that `hidden: auto` asks to match; None: it asks for no such thing."""
    asked = spec.model.hidden
    if not isinstance(asked, str):
        return None
    return int(asked.partition(":")[2] or usual_hidden(spec.model.width))


def matched_hidden(spec: RunSpec, dense: int) -> int:
    """The hidden width at which all blocks together come nearest to the parameters that they have in the dense model
    with the hidden width `dense`; of two that are equally near, the smaller. Embedding, head and the tables of anchors
    are left out: they do not depend on it."""
    m, sizes = spec.model, Sizes.of(spec)
    inner = m.heads * (m.head_dim or m.width // m.heads)
    free = spec.form.free_layers(sizes)
    # Columns of the matrices that write, over all layers: of W_o, and of W_down.
    columns = (m.layers - free) * spec.form.state_width(sizes) + free * m.width
    closing = spec.form.state_width(sizes) - spec.form.closing_width(sizes)
    down = columns - len(closing_layers(spec)) * closing
    if columns == down == m.layers * m.width:
        return dense
    # With this hidden width, which need not be whole, both would have the same: wanted / each.
    wanted = m.layers * 3 * m.width * dense + inner * (m.layers * m.width - columns)
    each = 2 * m.layers * m.width + down
    step = 32 if m.width >= WIDE else 8
    below = max(step, wanted // (each * step) * step)
    return min(below, below + step, key=lambda hidden: abs(hidden * each - wanted))
