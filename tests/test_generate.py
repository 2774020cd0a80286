"""`pmtrain generate` as a user meets it."""

from __future__ import annotations

import os
import re
import signal
import sys
import tty
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import make_model, make_tokenizer, save
from starting import begin
from typer.testing import CliRunner, Result

from protomodels_cli.cli.main import app
from protomodels_cli.cli.run_generate import run
from protomodels_cli.errors import UserError
from protomodels_cli.inference.generate import Sampling, generate
from protomodels_cli.inference.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    return save(make_model("llama", vocab_size=tokenizer.vocab_size), tmp_path_factory.mktemp("model"), tokenizer)


def told(*arguments: Any, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=given)


def text_of(done: Result) -> str:
    assert done.exit_code == 0, done.exception
    return done.stdout


def right_text(folder: Path, prompt: str, tokens: int) -> str:
    """By transformers, from the folder alone."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with torch.no_grad():
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=tokens)
    return str(tokenizer.decode(ids[0], clean_up_tokenization_spaces=False))


def test_the_likeliest_text_is_that_of_transformers(folder):
    right = right_text(folder, "The cat", 20)
    done = told(folder, "--prompt", "The cat", "--tokens", 20, "--temperature", 0)
    assert text_of(done) == right + "\n"
    assert re.match(r"20 tokens, .* tok/s, seed \d+\n$", done.stderr)


@pytest.mark.parametrize("more", [[], ["--prompt", "-"]])
def test_the_prompt_may_come_from_standard_input(folder, more):
    greedy = ["--tokens", 9, "--temperature", 0]
    right = text_of(told(folder, "--prompt", "a — 狗\nb", *greedy))
    assert right.startswith("a — 狗\nb")
    assert text_of(told(folder, *more, *greedy, given="a — 狗\nb\n")) == right
    assert text_of(told(folder, *more, *greedy, given="a — 狗\nb")) == right


def test_the_seed_is_told_and_repeats_the_text(folder):
    first = told(folder, "--prompt", "The", "--tokens", 30)
    seed = first.stderr.split()[-1]
    texts = [text_of(told(folder, "--prompt", "The", "--tokens", 30, "--seed", s)) for s in (seed, 1, 2)]
    assert texts[0] == text_of(first)
    assert len(set(texts)) == 3


def test_a_terminal_gets_no_commands_from_a_text(folder, monkeypatch):
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    prompt = "é\t\x1b]0;title\x07\x9b2J\r\x7f\n狗"
    with os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        run(str(folder), prompt, 3, 0.0, 1.0, 0, "cpu", "float32")
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.startswith(r"é	\x1b]0;title\x07\x9b2J\x0d\x7f" + "\n狗")
    assert text_of(told(folder, "--prompt", prompt, "--tokens", 3)).startswith(prompt)


def test_ids_without_a_token_are_never_drawn(tmp_path):
    """As where a vocabulary is padded."""
    tokenizer, model = make_tokenizer(), make_model("llama")
    assert tokenizer.vocab_size < model.config.vocab_size
    torch.nn.init.zeros_(model.model.norm.weight)  # all ids are as likely as each other
    loaded = load(str(save(model, tmp_path, tokenizer)))
    assert max(generate(loaded, [1], Sampling(60, 1.0, 1.0, 0))) < tokenizer.vocab_size


def test_an_empty_prompt_begins_a_text(folder):
    first = text_of(told(folder, "--prompt", "", "--seed", 1, "--tokens", 5))
    assert first.strip()
    assert "endoftext" not in first.removesuffix("\n")[:10]


def test_it_stops_where_the_context_is_full_and_says_so(folder):
    done = told(folder, "--prompt", "The cat", "--seed", 3)
    text_of(done)
    prompt = len(make_tokenizer().encode(["The cat"])[0])
    said = done.stderr.splitlines()
    assert len(said) == 2
    assert re.findall(r"\d+", said[0]) == ["64"]
    assert said[1].startswith(f"{64 - prompt} tokens")
    assert len(told(folder, "--prompt", "The cat", "--seed", 3, "--tokens", 64 - prompt).stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["--prompt", "cat " * 64], "prompt_too_long", 2),
        (["--device", "toaster"], "device", 2),
        (["--device", "cuda:99"], "device_cpu_torch" if torch.version.cuda is None else "device", 2),
    ],
)
def test_what_cannot_be_done_is_one_error(folder, arguments, kind, code):
    error = told(folder, *arguments).exception
    assert isinstance(error, UserError)
    assert (error.kind, error.exit_code) == (kind, code)


def test_a_model_of_ids_has_no_text(folder, tmp_path):
    error = told(save(make_model("llama"), tmp_path), "--prompt", "x").exception
    assert isinstance(error, UserError)
    assert (error.kind, error.exit_code) == ("no_tokenizer", 3)


def test_weights_that_are_not_finite_are_one_error(tmp_path):
    model = make_model("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    error = told(save(model, tmp_path, make_tokenizer()), "--prompt", "x").exception
    assert isinstance(error, UserError)
    assert error.kind == "nonfinite"


def test_the_end_of_a_text_is_not_shown_and_ends_it(tmp_path):
    """A head that prefers the end mark over all others."""
    tokenizer, model = make_tokenizer(), make_model("llama", eos_token_id=0)
    assert tokenizer.end_id == 0
    with torch.no_grad():
        model.model.norm.weight.fill_(0)
    done = told(save(model, tmp_path, tokenizer), "--prompt", "The cat", "--temperature", 0)
    assert text_of(done) == "The cat\n"
    assert done.stderr.startswith("0 tokens")


def test_ctrl_c_keeps_what_was_written(tmp_path):
    model = make_model("llama", max_position_embeddings=200_000)
    save(model, tmp_path / "model", make_tokenizer())
    with begin("generate", "model", "--prompt", "The cat\n", "--tokens", 150_000, cwd=tmp_path) as process:
        assert process.stdout.readline() == "The cat\n"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert rest.endswith("\n")


def test_whoever_reads_may_stop_reading(tmp_path):
    model = make_model("llama", max_position_embeddings=200_000)
    save(model, tmp_path / "model", make_tokenizer())
    with begin("generate", "model", "--prompt", "The cat\n", "--tokens", 150_000, cwd=tmp_path) as process:
        assert process.stdout.readline() == "The cat\n"
        process.stdout.close()
        assert process.wait(60) == 0
