"""Fixtures: one cache of tokens, one thread, and small specs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from pool import Pool

from protomodels_cli.codecs import Carrier
from protomodels_cli.data.prepare import Corpus, prepare
from protomodels_cli.model.reference import Reference
from protomodels_cli.spec import RunSpec, spec_from
from protomodels_cli.wire import tls

if TYPE_CHECKING:
    from scene import Scene

pytest_plugins = ["tier_hooks"]
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of what tests start too: two test processes share the cores already
# The same examples every time, and no deadline on a busy machine: a failure here is a fault, not the weather.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def broken_pipes() -> Iterator[None]:
    """Commands that end with their reader set this for their process, which is ours where a test calls one: a later
    test's write to a socket that was closed would end all without a word."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One for all test processes, which lie side by side in one folder."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["PMTRAIN_CACHE"] = str(folder / "tokens")
    os.environ["HF_MODULES_CACHE"] = str(base / "modules")  # where transformers puts the code of exports


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        torch._dynamo.config.recompile_limit = 64  # functions see the shapes of all tests, where a run has a few
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def make_spec(**sections: Any) -> RunSpec:
    """A four-layer spec on 200 kB of the built-in text; sections replace fields section by section."""
    base: dict[str, Any] = {
        "steps": 5,
        "stages": 4,
        "model": {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64, "context": 16},
        "subspace": {"form": "reparam", "k": 6, "update": {}},
        "optimizer": {"lr": 3e-3},
        "batch": {"size": 4, "microbatches": 2},
        "data": {"max_bytes": 200_000, "val_fraction": 0.1},
        "tokenizer": {"kind": "bytes"},
        "eval": {"windows": 8},
        "wire": {"forward": "fp32", "backward": "fp32"},
        "compute": {},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return spec_from(base)


_corpora: dict[str, Corpus] = {}


def corpus_of(spec: RunSpec) -> Corpus:
    """Prepared once for all specs with the same data."""
    key = f"{spec.data} {spec.tokenizer}"
    if key not in _corpora:
        _corpora[key] = prepare(spec)
    return _corpora[key]


def make_reference(**sections: Any) -> Reference:
    spec = make_spec(**sections)
    return Reference(spec, corpus_of(spec), Carrier(spec))


@pytest.fixture(scope="session")
def authority() -> tls.Authority:
    return tls.new_authority()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, token_cache: None) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture
def scene(pool: Pool, tmp_path: Path) -> Callable[[RunSpec], Scene]:
    from scene import Scene  # which needs make_spec from here

    return lambda spec: Scene(pool, tmp_path, spec)


@pytest.fixture
def spec() -> Callable[..., RunSpec]:
    return make_spec


@pytest.fixture
def reference() -> Callable[..., Reference]:
    return make_reference


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
