"""T_fixed on a device: a float row exists only for the tokens of the microbatch at hand, never the table."""

from __future__ import annotations

import torch
from torch import Tensor

from protomodels_cli.model.operators import EAGER, Operators
from protomodels_cli.protocol.t_fixed import packed_signs, t_fixed_sha256


class TFixed:
    def __init__(self, vocab_size: int, width: int, scale: float, seed: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.width, self.scale = vocab_size, width, scale
        self.signs = torch.from_numpy(packed_signs(vocab_size, width, seed)).to(device)

    def rows(self, tokens: Tensor, dtype: torch.dtype, operators: Operators = EAGER) -> Tensor:
        """T_fixed[tokens], as floats: shape (*tokens.shape, width)."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"token ids must be int64 or int32, not {tokens.dtype}, which cannot hold all of them exactly"
            )
        return operators.signed_rows(self.signs[tokens], self.width, self.scale, dtype)

    def sha256(self) -> str:
        """Hash of the bytes in use."""
        return t_fixed_sha256([self.signs.cpu().numpy()], self.vocab_size, self.width, self.scale)
