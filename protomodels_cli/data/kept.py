"""What a run keeps of its data beside its weights: enough to use the model where the token cache is not."""

from __future__ import annotations

import json
from pathlib import Path

from protomodels_cli.data.errors import DataError
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.files import write_whole

KEPT = CORPUS, TOKENIZER = "corpus.json", "tokenizer.json"


def check(corpus: Corpus, run_dir: Path) -> None:
    """That these are the tokens the run began with. Raises DataError."""
    try:
        right = json.loads((run_dir / CORPUS).read_bytes())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # nothing is known of them
    if corpus.sha256 != right:
        raise DataError(
            f"the data here have other tokens (sha256 {corpus.sha256[:8]}…) than the run began with ({right[:8]}…)",
            "put the files that the spec names in place as they were, and run the same command again",
            "other_corpus",
        )


def keep(corpus: Corpus, run_dir: Path) -> None:
    """Write what the corpus is, and the tokenizer where that is a file, unless they are there."""
    if (run_dir / CORPUS).exists():
        return
    if (corpus.folder / TOKENIZER).exists():  # first: the other one says that all is there
        write_whole(run_dir / TOKENIZER, (corpus.folder / TOKENIZER).read_bytes())
    about = {
        "source": corpus.manifest["source"],
        "sha256": corpus.sha256,
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
        "tokenizer": corpus.manifest["tokenizer"],
        "tokenizer_sha256": corpus.manifest["tokenizer_sha256"],
    }
    write_whole(run_dir / CORPUS, json.dumps(about, indent=1).encode() + b"\n")
