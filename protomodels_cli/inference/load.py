"""A model from wherever its weights are: an exported folder, a run directory, or a store's copy of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from protomodels_cli.data.errors import DataError
from protomodels_cli.data.tokenizers import Json
from protomodels_cli.export.source import Source, open_source
from protomodels_cli.export.weights import weights
from protomodels_cli.huggingface.architecture import architecture_of
from protomodels_cli.huggingface.weights import Weights
from protomodels_cli.inference.folder import architecture_in, ends_in, is_checkpoint, tokenizer_in
from protomodels_cli.inference.model import Decoder
from protomodels_cli.inference.places import check_model


@dataclass(frozen=True)
class Loaded:
    decoder: Decoder
    tokenizer: Json | None  # None: a model of ids
    ends: tuple[int, ...]  # ids at which a text ends
    marks: tuple[int, ...]  # ids before every text
    source: Source | None  # the run, where it is one

    @property
    def context(self) -> int:
        return self.decoder.architecture.context

    @property
    def document_end(self) -> int | None:
        """The id between two documents, where there is one."""
        if self.tokenizer is not None and self.tokenizer.end_id is not None:
            return self.tokenizer.end_id
        return self.ends[0] if self.ends else None

    def prompt(self, text: str) -> list[int]:
        """The ids to go on from. Without any text: the end of another one, or a new line."""
        assert self.tokenizer is not None
        ids = [*self.marks, *self.tokenizer.encode([text])[0].tolist()]
        if not ids and self.document_end is not None:
            return [self.document_end]
        return ids or self.tokenizer.encode(["\n"])[0].tolist()


def load(place: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
    loaded = (_from_folder if is_checkpoint(Path(place)) else _from_run)(place, device, dtype)
    tokenizer, most = loaded.tokenizer, loaded.decoder.architecture.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > most:
        raise DataError(
            f"the tokenizer of {place} has {tokenizer.vocab_size} ids, and the model {most}",
            "put the model's own tokenizer.json there",
            "vocabulary",
        )
    return loaded


def _from_folder(place: str, device: torch.device | str, dtype: torch.dtype) -> Loaded:
    folder = Path(place)
    architecture, tokenizer = architecture_in(folder), tokenizer_in(folder)
    with Weights(folder, architecture) as files:
        makers = ((name, lambda name=name: torch.from_numpy(files.array(name))) for name in architecture.weights)
        decoder = Decoder(architecture, makers, device, dtype)
    return Loaded(decoder, tokenizer, ends_in(folder), tokenizer.marks_before() if tokenizer else (), None)


def _from_run(place: str, device: torch.device | str, dtype: torch.dtype) -> Loaded:
    check_model(place)
    with open_source(place) as source:
        decoder = Decoder(architecture_of(source.spec), weights(source), device, dtype)
    if source.tokenizer is None:
        return Loaded(decoder, None, (), (), source)
    end = source.tokenizer.end_id
    return Loaded(decoder, Json(source.tokenizer.json), () if end is None else (end,), (), source)
