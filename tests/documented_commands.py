"""Every line of a ```bash block in README and docs: which test runs it, or why none does. test_documented.py holds this
table against the pages, so that a new line needs a place here.

A line is written as `lines_of` gives it: without its comment, `.venv/bin/` and `$ `. One that ends with * stands for
all that begin so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?ms)^ *```bash\n(.*?)^ *```")

RUN: dict[str, tuple[str, ...]] = {  # by the name of the test
    "test_commands_of_the_pages_run": ("pmtrain validate *", "pmtrain plan *", "pmtrain reference *"),
    "test_the_walk_of_the_readme": (
        "pmtrain coordinator friends.yaml --host 203.0.113.7",
        "pmtrain invite friends",
        "pmtrain status friends",
        "pmtrain export friends friends-model",
        'pmtrain generate friends-model --prompt "The state of the union"',
        "pmtrain eval friends",
    ),
    "test_lab_commands_write_their_numbers_and_their_picture": tuple(
        f"pmtrain lab {name} --json out/{name}.json --plot out/{name}.png"
        for name in ("reconstruct", "optimizer", "rank", "grassmann", "frontier", "scaling", "replicas", "bandwidth")
    ),
    "test_the_documented_commands_run": (
        "pmtrain runs",
        "pmtrain top tiny",
        "pmtrain status tiny",
        "pmtrain peers tiny",
        "pmtrain events tiny",
        "pmtrain events tiny --kind 'peer_*' --kind rolled_back --since 2h",
        "pmtrain logs tiny --last 20",
        "pmtrain logs tiny --peer attic",
    ),
    "test_what_is_followed_comes_at_once_and_ctrl_c_leaves": ("pmtrain events tiny --follow",),
    "test_top_follows_a_run_through_its_coordinators_end_and_return": ("pmtrain top",),
    "test_it_asks_on_a_terminal": ("pmtrain init", "pmtrain init friends.yaml"),
    "test_validate_and_plan_pass_on_it": ("pmtrain init run.yaml --yes *",),
    "test_an_invitation_for_one_friend_and_for_all": (
        "pmtrain invite tiny",
        "pmtrain invite tiny --for Ann",
        "pmtrain invite tiny --qr --html invitation.html",
    ),
    "test_an_owner_is_told_how_the_run_is": (
        "pmtrain pause tiny",
        "pmtrain resume tiny",
        "pmtrain stop tiny",
        "pmtrain rm tiny",
    ),
    "test_tokens_and_kicks_from_the_command_line_over_a_restart": ("pmtrain kick tiny attic",),
    "test_without_a_link_only_this_machine_is_checked": ("pmtrain doctor",),
    "test_a_line_is_measured_and_refusals_are_told_apart": ("pmtrain doctor 'pm://…'",),
    "test_bash_offers": ("pmtrain --show-completion",),
    "test_the_prompt_may_come_from_standard_input": (
        'echo "My fellow citizens" | pmtrain generate runs/tiny --temperature 0.5 --seed 7 > text.txt',
    ),
    "test_the_likeliest_text_is_that_of_transformers": ('pmtrain generate out/tiny --prompt "The state of the union"',),
    "test_all_kinds_of_files_and_many_of_them": (
        "pmtrain eval out/tiny --data 'texts/*.txt' --data more.jsonl.zst --field body --json out/eval.json",
    ),
    "test_the_harness_measures_what_the_reference_computes": ("lm_eval --model hf *",),
    "test_the_benchmark_counts_bytes_at_the_socket": ("pmtrain bench loopback --json out/loopback.json",),
    "test_a_small_pipeline_is_measured": (
        "pmtrain bench gpu --list",
        "pmtrain bench gpu --shape tiny --device cpu --torch eager --link 2mbit,5ms",
    ),
    "test_a_capped_run_ends_with_the_references_weights": ("pmtrain join 'pm://…' --upload 10mbit --download 50mbit",),
    "test_peers_rest_and_wake_by_their_machines_and_their_owners_wish_and_no_step_is_redone": (
        "pmtrain rest",
        "pmtrain wake",
    ),
    "test_a_real_run_tells_of_its_end_and_a_dead_target_changes_nothing": (
        "pmtrain coordinator run.yaml --notify https://ntfy.sh/our-secret-topic",
    ),
    "test_a_named_device_takes_one_step_and_is_compared": ("pmtrain doctor --device cpu",),
    "test_memory_stays_near_the_largest_tensor": ("python tests/export_memory.py *",),
}

NOT_RUN: dict[str, tuple[str, ...]] = {  # by the reason
    "for hosts with these addresses; a test starts a relay and a coordinator with the same options on loopback": (
        "pmtrain relay --host 203.0.113.9",
        "pmtrain coordinator run.yaml --host 203.0.113.7 --relay relay.link",
    ),
    "… stands for a link; every test of a run joins it with the link that its coordinator prints": (
        "pmtrain join 'pm://…'",
        "pmtrain join 'pm://…' --hours 22:00-07:00",
    ),
    "a synopsis, not a command": ("pmtrain export [RUN] OUT [*",),
    "installs an environment first, as every run of the tests has done": (
        "scripts/demo.sh",
        "scripts/test.sh",
    ),
    "minutes of both cores; faults of each kind have tests of their own": ("pmtrain demo --chaos 7",),
    "minutes to an hour of both cores, some as root; a short one of the same code is run by a test": (
        "pmtrain bench wan *",
        "pmtrain bench transfers *",
        "pmtrain bench recovery *",
        "pmtrain bench viewers *",
        "scripts/wanlab *",
    ),
    "needs a GPU, and hours of it": (
        "pmtrain lab frontier --scale gpu *",
        "pmtrain lab replicas --scale gpu *",
        "pmtrain bench gpu --json *",
        "pmtrain bench gpu --devices *",
        "pmtrain bench gpu --shape 8b *",
    ),
    "downloads from elsewhere": (
        "python scripts/python_text.py text.jsonl.zst",
        "pip install *",
        "git clone *",
        "python llama.cpp/*",
    ),
    "needs a package that is not installed for the tests; where it is, a test follows a run with the same code": (
        "pmtrain follow runs/tiny --tensorboard board",
        "pmtrain follow runs/tiny --wandb my-project",
    ),
    "the same as of events, which a test follows": ("pmtrain logs tiny --follow",),
    "writes into the shell's own start files": ("pmtrain --install-completion",),
}


def lines_of(text: str) -> Iterator[str]:
    """The command lines of a page. One that ends with a backslash goes on with the next."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if command:
                yield " ".join(command.split())


def documented() -> dict[str, set[str]]:
    """Every line, and the pages that it is on."""
    found: dict[str, set[str]] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in lines_of(page.read_text(encoding="utf-8")):
            found.setdefault(line, set()).add(page.name)
    return found


def fits(line: str, entry: str) -> bool:
    return line.startswith(entry[:-1]) if entry.endswith("*") else line == entry


def places(line: str) -> list[str]:
    """The tests that run a line, and the reasons why none does; a line of its own comes before a pattern."""
    table = [(entry, where) for part in (RUN, NOT_RUN) for where, entries in part.items() for entry in entries]
    exact = [where for entry, where in table if entry == line]
    return exact or [where for entry, where in table if fits(line, entry)]


def run_by(test: str) -> list[str]:
    """The documented lines that a test runs, for the test to take them from here."""
    return sorted(line for line in documented() if test in places(line))
