"""The dense form: an ordinary transformer, d numbers a token. Also what the last, free layers of other forms are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomodels_cli.forms.base import Form

if TYPE_CHECKING:
    from torch import Tensor


class Dense(Form):
    name = "dense"
    about = "has no subspace"

    @classmethod
    def init_problem(cls) -> tuple[str, str] | None:
        return None  # it is one

    def read(self, state: Tensor, anchor: Tensor | None) -> Tensor:
        return state if anchor is None else state + anchor
