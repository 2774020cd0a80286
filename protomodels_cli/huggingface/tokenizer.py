"""The files by which transformers' AutoTokenizer turns text into the very ids that a run was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from protomodels_cli.data.tokenizers import Json

TOKENIZER = "tokenizer.json"
NUL = "\0"  # ends a document where tokens are bytes


@dataclass(frozen=True)
class RunTokenizer:
    """What a run was tokenised with, as a tokenizer.json, and the id that ends a document."""

    json: str
    end_id: int | None

    @classmethod
    def of_bytes(cls) -> RunTokenizer:
        return cls.of_json(bytes_tokenizer())

    @classmethod
    def of_json(cls, text: str) -> RunTokenizer:
        """Raises DataError where the text is no tokenizer.json."""
        return cls(text, Json(text).end_id)

    def files(self, context: int) -> dict[str, str]:
        """File name → content. `context`: the most tokens that the model was trained on at once."""
        import tokenizers

        # Our ids are those of the text alone: without a mark before it, cut nowhere, filled up to nothing.
        plain = json.loads(self.json) | dict.fromkeys(("post_processor", "truncation", "padding"))
        special: dict[str, str] = {}
        if self.end_id is not None:
            end = str(tokenizers.Tokenizer.from_str(self.json).id_to_token(self.end_id))
            special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **special,
        }
        named = {TOKENIZER: plain, "tokenizer_config.json": config, "special_tokens_map.json": special}
        return {name: _dump(content) for name, content in named.items()}


def bytes_tokenizer() -> str:
    """A tokenizer.json whose ids are the bytes of the text in UTF-8: byte-level byte pairs, without a pair."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    # NUL is a token by its own name. By its letter, Ā, a text could mean the letter itself.
    del vocabulary[_letters()[0]]
    vocabulary[NUL] = 0
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
    return _dump(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 0, "content": NUL, **flags, "special": True}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )


def _letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
