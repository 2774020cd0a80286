"""What people would otherwise run on one card: a dense LLaMA in plain torch, as the oracle of speed.

    python -m protomodels_cli.bench.torch_plain --shape '{"layers": 8, …}' --windows 32 --microbatch 4 --way compile \\
        --device cuda:0 --json OUT.json

Written on its own: torch's modules, autocast, torch.compile over model and loss, fused AdamW and clip_grad_norm_. It
must not import our model, optimizer or transport: where they lose something, it must show against this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protomodels_cli.bench.timing import Timing

# compile and eager: bf16 autocast over float32 weights; float32: no autocast, TF32 off, not compiled
WAYS = ("compile", "eager", "float32")


class Attention(nn.Module):
    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        width, self.heads, self.kv_heads, self.size = (shape[n] for n in ("width", "heads", "kv_heads", "head_dim"))
        self.q = nn.Linear(width, self.heads * self.size, bias=False)
        self.k = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = turned(self.q(x).view(rows, tokens, self.heads, self.size).transpose(1, 2), cos, sin)
        k = turned(self.k(x).view(rows, tokens, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v(x).view(rows, tokens, self.kv_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).reshape(rows, tokens, self.heads * self.size))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, in the type of x."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        width, hidden = shape["width"], shape["hidden"]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(shape)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        self.embed = nn.Embedding(shape["vocabulary"], shape["width"])
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape["layers"]))
        self.norm = nn.RMSNorm(shape["width"], eps=1e-5)
        self.head = nn.Linear(shape["width"], shape["vocabulary"], bias=False)
        half = shape["head_dim"] // 2
        angles = torch.outer(torch.arange(shape["context"]).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss of windows of context + 1 ids."""
        x = self.embed(windows[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Training:
    """Steps of `windows` windows, in microbatches whose gradients add up."""

    def __init__(self, shape: dict[str, Any], way: str, device: str, windows: int, microbatch: int):
        torch.manual_seed(0)
        self.device, self.rounds = torch.device(device), windows // microbatch
        with self.device:
            self.model = Llama(shape)
        # The loss is inside: compiled with the model, its float32 logits are never written out.
        self.loss: Callable[[Tensor], Tensor] = torch.compile(self.model) if way == "compile" else self.model
        self.autocast = way != "float32"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        size = (microbatch, shape["context"] + 1)
        self.batch = [torch.randint(shape["vocabulary"], size, device=self.device) for _ in range(self.rounds)]

    def step(self) -> float:
        """One optimizer step; returns its mean loss once the device is done."""
        total = torch.zeros((), device=self.device)
        for windows in self.batch:
            with self._cast():
                loss = self.loss(windows) / self.rounds
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return float(total)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A dense LLaMA in plain torch, timed.")
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as a stage has, where the device is the CPU
    training = Training(options.shape, options.way, options.device, options.windows, options.microbatch)
    timing = Timing(options.warm_up, options.steps, options.seconds)
    took: list[float] = []
    losses: list[float] = []
    while not timing.reached(took):
        started = time.perf_counter()
        losses.append(training.step())
        took.append(time.perf_counter() - started)
    cuda = training.device.type == "cuda"
    result = {
        "step_seconds": took,
        "losses": losses,
        "peak_memory": torch.cuda.max_memory_allocated(training.device) if cuda else None,
        "reserved_memory": torch.cuda.max_memory_reserved(training.device) if cuda else None,
    }
    options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
