"""The generate command's work: everything that needs torch."""

from __future__ import annotations

import os
import secrets
import sys
import time

import typer

from protomodels_cli.cli.checks import chosen_device, enough_memory
from protomodels_cli.cli.interrupt import raise_on_ctrl_c
from protomodels_cli.errors import EXIT_INTERRUPTED, OptionError, UserError
from protomodels_cli.inference.generate import Sampling, generate, limit_threads
from protomodels_cli.inference.load import Loaded, load
from protomodels_cli.inference.text import Detokenizer, printable
from protomodels_cli.quantities import plural, rate


def run(
    place: str,
    prompt: str | None,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    device: str,
    dtype: str,
) -> None:
    import torch

    where = chosen_device(device)
    text = _prompt(prompt)
    sampling = Sampling(tokens, temperature, top_p, secrets.randbelow(1 << 32) if seed is None else seed)
    with enough_memory(where):
        loaded = load(place, where, getattr(torch, dtype))
        if loaded.tokenizer is None:
            raise UserError(
                f"{place} has no tokenizer: this model was trained on ids",
                "put the tokenizer.json that made the ids into an exported folder",
                "no_tokenizer",
            )
        limit_threads(loaded.decoder)
        try:
            _write(loaded, text, sampling)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:  # whoever read has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prompt(given: str | None) -> str:
    """Standard input loses the new line at its end, as in $(…)."""
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def _write(loaded: Loaded, text: str, sampling: Sampling) -> None:
    prompt = loaded.prompt(text)
    if len(prompt) >= loaded.context:
        raise OptionError(
            f"the prompt has {len(prompt)} tokens, and the model's context {loaded.context}",
            f"shorten the prompt to fewer than {loaded.context} tokens",
            "prompt_too_long",
        )
    raise_on_ctrl_c()
    assert loaded.tokenizer is not None
    made, started, words = 0, time.perf_counter(), Detokenizer(loaded.tokenizer, prompt)
    try:
        _out(text)
        for token in generate(loaded, prompt, sampling):
            made += 1
            _out(words.push(token))
        _out(words.end())
    finally:
        _out("\n")
    speed = rate(made / (time.perf_counter() - started), "tok/s")
    if made < sampling.tokens and len(prompt) + made == loaded.context:
        print(f"stopped: the model's context of {loaded.context} tokens is full", file=sys.stderr)
    print(f"{plural(made, 'token')}, {speed}, seed {sampling.seed}", file=sys.stderr)


def _out(text: str) -> None:
    """At once, and in UTF-8 whatever the terminal's settings are. A terminal gets no commands from a model."""
    if sys.stdout.isatty():
        text = printable(text)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
