"""What a run keeps of its data beside its weights: enough to use the model where the token cache is not."""

from __future__ import annotations

import json
from pathlib import Path

from protomodels_cli.data.prepare import Corpus
from protomodels_cli.files import write_whole

KEPT = CORPUS, TOKENIZER = "corpus.json", "tokenizer.json"


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
