"""T_fixed on a device: a float row exists only for the tokens of the microbatch at hand, never the table."""

from __future__ import annotations

import torch
from torch import Tensor

from protomodels_cli.protocol.t_fixed import packed_signs, t_fixed_sha256


class TFixed:
    def __init__(self, vocab_size: int, width: int, scale: float, seed: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.width, self.scale = vocab_size, width, scale
        self.signs = torch.from_numpy(packed_signs(vocab_size, width, seed)).to(device)
        self._bit = torch.arange(8, dtype=torch.uint8, device=device)

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """T_fixed[tokens], as floats: shape (*tokens.shape, width)."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"token ids must be int64 or int32, not {tokens.dtype}, which cannot hold all of them exactly"
            )
        packed = self.signs[tokens]  # (…, width/8)
        bits = (packed.unsqueeze(-1) >> self._bit) & 1  # (…, width/8, 8)
        signs = bits.flatten(-2)[..., : self.width].to(dtype)
        return signs.mul_(2 * self.scale).sub_(self.scale)

    def sha256(self) -> str:
        """Hash of the bytes in use."""
        return t_fixed_sha256([self.signs.cpu().numpy()], self.vocab_size, self.width, self.scale)
