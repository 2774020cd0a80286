"""What is drawn from logits, and how ids become text while they come."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import TEXT, make_tokenizer

from protomodels_cli.data.tokenizers import Bytes, Json
from protomodels_cli.inference.sampling import next_token, nucleus, probabilities
from protomodels_cli.inference.text import Detokenizer, bytes_of

LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=40).map(torch.tensor)


@given(LOGITS, st.floats(0, 1), st.floats(0.05, 5))
def test_the_nucleus_is_the_smallest_set_with_the_share(logits, top_p, temperature):
    p = probabilities(logits, temperature)
    assert float(p.sum()) == pytest.approx(1)
    ids, cumulative = nucleus(p, top_p)
    kept = sorted(p[ids].tolist())
    assert len(set(ids.tolist())) == len(ids) >= 1
    assert math.fsum(kept) >= top_p - 1e-9
    assert len(kept) == 1 or math.fsum(kept[1:]) < top_p + 1e-9, "without its least likely token it has less"
    left_out = set(range(len(p))) - set(ids.tolist())
    assert all(p[i] <= kept[0] for i in left_out)
    assert float(cumulative[-1]) == pytest.approx(math.fsum(kept))


@given(LOGITS, st.floats(0.05, 1), st.integers(0, 1000))
def test_what_is_drawn_lies_in_the_nucleus_and_is_the_seeds(logits, top_p, seed):
    def drawn() -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [next_token(logits, 1.0, top_p, generator) for _ in range(5)]

    assert drawn() == drawn()
    assert set(drawn()) <= set(nucleus(probabilities(logits, 1.0), top_p)[0].tolist())


@given(st.lists(st.integers(-300, 300), min_size=2, max_size=40, unique=True), st.integers(0, 1000))
def test_small_temperatures_take_the_likeliest_as_0_does(values, seed):
    logits = torch.tensor(values, dtype=torch.float32) / 10
    for temperature, top_p in ((0.0, 1.0), (1e-3, 1.0), (1e-300, 1.0), (1.0, 0.0)):
        drawn = next_token(logits, temperature, top_p, torch.Generator().manual_seed(seed))
        assert drawn == int(logits.argmax())


def test_draws_have_the_models_shares():
    shares = torch.tensor([0.5, 0.2, 0.2, 0.1])
    generator = torch.Generator().manual_seed(0)
    for top_p, right in ((1.0, [0.5, 0.2, 0.2, 0.1]), (0.6, [5 / 7, 2 / 7, 0, 0])):
        drawn = [next_token(shares.log(), 1.0, top_p, generator) for _ in range(2000)]
        found = np.bincount(drawn, minlength=4) / len(drawn)
        assert found == pytest.approx(right, abs=0.04)


def test_large_temperatures_draw_evenly():
    p = probabilities(torch.tensor([30.0, 0.0, -30.0]), 1e9)
    assert p.tolist() == pytest.approx([1 / 3] * 3)


def sentencepiece() -> Json:
    """As Llama 2 has it: spaces are letters, one is put before a text, and rare letters are bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    words = ["<unk>", "▁", "▁the", "▁cat", "c", "a", "t", ".", "▁sat"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    merges = [("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    vocabulary |= {"▁c": len(vocabulary), "▁ca": len(vocabulary) + 1}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Json(inner.to_str())


@pytest.mark.parametrize("tokenizer", [Bytes(), make_tokenizer(), sentencepiece()], ids=["bytes", "bpe", "llama2"])
@given(st.text(min_size=0, max_size=30).filter(lambda t: "\0" not in t and "\ufffd" not in t), st.integers(0, 8))
def test_text_comes_in_whole_characters_and_adds_up(tokenizer, text, begun):
    ids = tokenizer.encode([text])[0].tolist()
    whole = tokenizer.decode(ids)
    begun = next((i for i in range(begun, len(ids)) if not tokenizer.decode(ids[:i]).endswith("\ufffd")), 0)
    out = Detokenizer(tokenizer, ids[:begun])
    parts = [out.push(i) for i in ids[begun:]]
    assert "".join(parts) + out.end() == whole[len(tokenizer.decode(ids[:begun])) :]
    assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_come_out_too(ids):
    out = Detokenizer(Bytes(), [])
    assert "".join([*map(out.push, ids), out.end()]) == Bytes().decode(ids)


@pytest.mark.parametrize("tokenizer", [Bytes(), make_tokenizer()], ids=["bytes", "bpe"])
@given(st.lists(st.text(max_size=20).filter(lambda t: "\0" not in t), min_size=1, max_size=4))
def test_bytes_of_ids_are_those_of_the_text_however_it_is_cut(tokenizer, documents):
    ids = [i for ids in tokenizer.encode(documents) for i in [*ids.tolist(), tokenizer.end_id]]
    halves = np.array_split(np.array(ids), 3)
    assert sum(bytes_of(tokenizer, half) for half in halves) == len("".join(documents).encode())


def test_bytes_of_ids_that_are_not_spelled_byte_by_byte():
    tokenizer, text = sentencepiece(), "the cat sat."
    assert bytes_of(tokenizer, tokenizer.encode([text])[0]) == len(text)


def test_a_long_text_comes_piece_by_piece():
    tokenizer = make_tokenizer()
    out = Detokenizer(tokenizer, [])
    parts = [out.push(i) for i in tokenizer.encode([TEXT])[0].tolist()]
    assert "".join(parts) == TEXT
    assert len([p for p in parts if p]) > len(parts) / 2
