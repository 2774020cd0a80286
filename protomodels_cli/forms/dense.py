"""The dense form: an ordinary transformer, d numbers a token. Also what the last, free layers of other forms are."""

from __future__ import annotations

from protomodels_cli.forms.base import Form, Sizes


class Dense(Form):
    name = "dense"
    about = "has no subspace"

    @classmethod
    def free_layers(cls, sizes: Sizes) -> int:
        return sizes.layers

    @classmethod
    def init_problem(cls) -> tuple[str, str] | None:
        return None  # it is one
