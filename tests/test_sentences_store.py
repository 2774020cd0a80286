"""How it reads what concerns the store: notices (which test_sentences.py checks with all others), and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from starting import pmtrain
from test_takeover import Lost, lost  # noqa: F401

from protomodels_cli.coordinator import notices as n
from protomodels_cli.coordinator.deposit import AUTHORITY
from protomodels_cli.coordinator.seal import KEY_FILE, StoreKey, own_key, read_key
from protomodels_cli.coordinator.takeover import open_store, take_over
from protomodels_cli.errors import EXIT_SPEC, UserError

STORE: list[tuple[n.Notice, str]] = [
    (
        n.StoreKeyMade("runs/home/store.key", "s3://b/home"),
        "made the key runs/home/store.key: keep a copy of it away from this machine. If this machine is lost, `pmtrain "
        "coordinator --from s3://b/home --key FILE` continues the run on another, and without the key nothing does",
    ),
    (
        n.StoreNotDirect("s3://b/home", "no credentials"),
        "peers cannot use s3://b/home themselves: no credentials; all parts go through the coordinator",
    ),
    (n.JournalNotCopied("s3://b/home", "no route"), "could not copy the journal to s3://b/home: no route; retrying"),
    (n.StoredUnusable("0001-00000006", "hash mismatch"), "not using 0001-00000006: hash mismatch"),
    (
        n.TookOver("s3://b/home", 7, 6, in_memory=True),
        "taking over from s3://b/home after step 7; where a stage is not in memory, from the snapshot at step 6",
    ),
    (
        n.TookOver("s3://b/home", 0, 0, in_memory=False),
        "taking over from s3://b/home: from the beginning, since no journal there is newer",
    ),
]


def said(work: Callable[[], object], folder: Path) -> tuple[str, str]:
    with pytest.raises(UserError) as caught:
        work()
    what, fix = str(caught.value).replace(folder.as_uri(), "URL").replace(str(folder), "FOLDER").split("\n    fix:  ")
    return what, fix


def test_refusals_name_the_value_the_rule_and_the_fix(lost: Lost):  # noqa: F811
    folder, key = lost.folder, read_key(lost.run_dir.path / KEY_FILE)
    store = folder / "store"

    def opening(url: Path, with_key: StoreKey = key) -> Callable[[], object]:
        return lambda: open_store(url.as_uri(), with_key)

    assert said(opening(store, StoreKey(b"x" * 32)), folder) == (
        f"the key does not open URL/store/home/{AUTHORITY}: it is sealed under another one",
        "name the store.key of this very run (--key FILE); every run has its own, unless its owner named one",
    )
    assert said(opening(folder / "nowhere"), folder) == (
        "there is no copy of a run at URL/nowhere",
        "check the URL: it is what snapshots.copy_to of the run says, or the run's own folder there",
    )
    assert said(lambda: take_over(lost.stored(), folder / "lost", None, print), folder) == (
        "FOLDER/lost is there already, and not empty",
        "choose another --dir, or, if the run is in there, `pmtrain coordinator --resume --dir FOLDER/lost`",
    )
    (store / "home/0001-00000002/stage-1.safetensors").write_bytes(b"rot")
    assert said(lambda: take_over(lost.stored(), folder / "new", None, lambda text: None), folder) == (
        "no snapshot in the store is whole; the newest: URL/store/home/0001-00000002: stage-1.safetensors is damaged "
        "(hash mismatch)",
        "restore that file from a copy of the store, and try again",
    )
    shutil.copytree(store / "home", store / "second")
    assert said(opening(store), folder) == (
        "URL/store holds copies of 2 runs: home, second",
        "name one of them, for example URL/store/second",
    )
    sealed = (store / "home" / AUTHORITY).read_bytes()
    (store / "home" / AUTHORITY).write_bytes(sealed[:-1])
    assert said(opening(store / "home"), folder) == (
        f"URL/store/home/{AUTHORITY} is damaged (not the bytes that were sealed)",
        f"restore {AUTHORITY} from a copy of the store",
    )
    (store / "home" / AUTHORITY).unlink()
    (store / "home/spec.json").touch()
    assert said(opening(store / "home"), folder) == (
        f"URL/store/home has snapshots of a run and no {AUTHORITY}: its coordinator had no time to put it there",
        "continue from the run directory; the weights can be exported with `pmtrain export`",
    )


def test_keys_that_cannot_be_used(tmp_path: Path):
    (tmp_path / "key").write_text("something else")
    assert said(lambda: read_key(tmp_path / "key"), tmp_path) == (
        "FOLDER/key holds no store key: that is one line, pmtrain-store-key-1: and 43 characters",
        "name the file store.key that the coordinator wrote to its run directory, or a copy of it",
    )
    assert said(lambda: read_key(tmp_path / "none"), tmp_path) == (
        "cannot read the store key FOLDER/none: No such file or directory",
        "name a copy of the run's store.key that this user can read",
    )
    own_key(tmp_path, None)
    assert said(lambda: own_key(tmp_path, StoreKey(b"x" * 32)), tmp_path) == (
        "FOLDER/store.key is another key than the one that was named",
        "leave out --key and PMTRAIN_STORE_KEY: the store's copy of this run is sealed under FOLDER/store.key",
    )


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (
            ["--from", "s3://b/home"],
            "--from s3://b/home needs the key of the run",
            "name the run's store.key with --key FILE, or put its line into PMTRAIN_STORE_KEY",
        ),
        (
            ["--from", "s3://b/home", "--resume"],
            "--from s3://b/home makes a new run directory",
            "leave out --resume and --rebuild: they are for a run directory that is still there",
        ),
        (
            ["--from", "s3://b/home", "--also-at", "2001:db8::1:7420"],
            "--also-at 2001:db8::1:7420: must be HOST:PORT",
            "write for example 203.0.113.9:7420, and an IPv6 address in brackets",
        ),
    ],
)
def test_options_that_do_not_go_together(options: list[str], what: str, fix: str):
    done = pmtrain("coordinator", *options)
    assert (done.returncode, done.stderr) == (EXIT_SPEC, f"{what}\n    fix:  {fix}\n")
