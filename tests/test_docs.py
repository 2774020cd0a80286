"""The documents say what is true: they are compared with the code, and their commands are run."""

import ast
import hashlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starting import begin, begin_logged, pmtrain
from test_run import ends, wait_for_line
from tiers import first
from typer.testing import CliRunner

from protomodels_cli import PROTOCOL, errors
from protomodels_cli.cli.main import app
from protomodels_cli.spec.document import EXAMPLE, document
from protomodels_cli.spec.load import load_spec
from protomodels_cli.wire.pb import pmtrain_pb2

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OWN_RUN, RESEARCHERS = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("own-run", "for-researchers"))


def test_the_spec_page_is_made_from_the_schema():
    assert (ROOT / "docs" / "spec.md").read_text() == document(), "run scripts/docs.sh"


def test_the_example_of_the_spec_page_is_a_spec(tmp_path):
    (tmp_path / "friends.yaml").write_text(EXAMPLE)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("My fellow citizens")
    assert load_spec(tmp_path / "friends.yaml").stages == 4


def commands() -> list[str]:
    """Every pmtrain command in a code block of the README, and of the pages that go on where it ends."""
    blocks = re.findall(r"```bash\n(.*?)```", README + OWN_RUN + RESEARCHERS, re.DOTALL)
    lines = [line.split("#")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return sorted({line.removeprefix(".venv/bin/") for line in lines if re.match(r"(\.venv/bin/)?pmtrain ", line)})


def test_the_pages_have_commands():
    assert len([c for c in commands() if " lab " in c]) == len(LAB_KEYS)
    alone = {"init", "join", "validate", "plan", "reference", "lab", "bench", "demo", *MODEL}
    assert {c.split()[1] for c in commands()} == {*alone, *LIVE}


def in_order(names: tuple[str, ...]) -> list[str]:
    return [command for name in names for command in commands() if command.split()[1] == name]


def run(words: list[str]) -> None:
    done = pmtrain(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", first(2, in_order(("plan", "validate", "reference"))))
def test_commands_of_the_pages_run(command, tmp_path):
    """As they stand, but short."""
    words = shlex.split(command)[1:]
    if words[0] == "reference":
        words += ["--steps", "2", "--run-dir", str(tmp_path / "run")]
    run([w for word in words for w in (map(str, ROOT.glob(word)) if "*" in word else [word])])


def test_mistakes_are_shown_as_they_are_said(tmp_path, monkeypatch):
    [shown] = re.findall(r"\$ pmtrain validate mine.yaml\n(.*?)```", OWN_RUN, re.DOTALL)
    text = (ROOT / "configs" / "constrained.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("k: 16\n", "k: 256\n").replace("name: row_adamw", "name: adamw"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["validate", "mine.yaml"])
    assert (done.exit_code, done.output) == (errors.EXIT_SPEC, shown)


@pytest.mark.parametrize(("shown", "code"), [("run.yaml", 0), ("big.yaml", errors.EXIT_SPEC)])
def test_what_init_answers_is_as_shown(shown, code, tmp_path, monkeypatch):
    [(command, answer)] = re.findall(rf"\$ (pmtrain init {shown} .*?)\n(.*?)\n```", OWN_RUN, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    said = str(done.exception) if code else done.output
    assert (getattr(done.exception, "exit_code", 0), said.strip()) == (code, answer.strip())


LIVE = ("coordinator", "invite", "status")
MODEL = ("export", "generate", "eval")


@pytest.mark.full
def test_the_walk_of_the_readme(tmp_path):
    """Two terminals: what the README says to type, in its order, with this machine's address and fewer steps."""
    text = re.sub("(?m)^steps: .*", "steps: 40", (ROOT / "configs" / "tiny.yaml").read_text())
    text = text.replace("stages: 4", "stages: 2").replace("name: tiny", "name: friends")
    (tmp_path / "friends.yaml").write_text(text)
    lead, *watch = in_order(LIVE)
    words = lead.replace("203.0.113.7", "127.0.0.1").split()[1:]
    leader = begin(*words, "--port", 0, cwd=tmp_path)
    try:
        joining = shlex.split(wait_for_line(leader, "pmtrain join").strip())[1:]
        peers = [begin(*joining, "--dir", tmp_path / str(i), cwd=tmp_path) for i in range(2)]
        wait_for_line(peers[0], "^step ")
        for command in watch:
            address = ("--install-from", "git+https://example.org/pmtrain.git") if " invite " in command else ()
            done = pmtrain(*shlex.split(command)[1:], *address, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert (address and address[1] in done.stdout) or done.stdout.startswith("friends: running")
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
        said = []
        for command in in_order(MODEL):
            done = pmtrain(*shlex.split(command)[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)
        assert said[1].startswith(shlex.split(in_order(MODEL)[1])[-1])
        rows = map(json.loads, (tmp_path / "runs" / "friends" / "metrics.jsonl").read_text().splitlines())
        [*_, right] = (row["loss"] for row in rows if row["event"] == "eval")
        assert float(re.findall(r"[\d.]+", said[2])[0]) == pytest.approx(right, abs=1e-4)
    finally:
        leader.kill()


@pytest.mark.full
def test_the_benchmark_counts_bytes_at_the_socket(tmp_path, monkeypatch):
    """… TLS and headers included: at most 1.05 × the payload, at 4096 tokens a microbatch."""
    monkeypatch.setattr("protomodels_cli.launch.local.start", begin_logged)
    done = CliRunner().invoke(app, ["bench", "loopback", "--only", "wire", "--json", str(tmp_path / "wire.json")])
    assert done.exit_code == 0, done.output
    wire = json.loads((tmp_path / "wire.json").read_text())["wire"]
    assert set(wire) == {"fp32", "bf16", "int8"}
    for codec, legs in wire.items():
        for leg, row in legs.items():
            assert 1.0 < row["ratio"] <= 1.05, (codec, leg)


LAB_KEYS = {
    "reconstruct": {"max_error_float64", "max_error_float32", "max_grad_error_float64", "max_grad_error_float32"},
    "optimizer": {"drift"},
    "rank": {"stable_rank"},
    "grassmann": {"orthonormality_error", "verdict"},
    "frontier": {"rows", "families", "missing", "time_to_loss"},
    "scaling": {"rows", "missing", "rule"},
    "replicas": {"rows", "missing", "outer"},
    "bandwidth": {"rows", "free_from_mbit", "best"},
}
SHORT = {
    "grassmann": ["--updates", "4", "--interval", "3"],
    "frontier": ["--steps", "6", "--seeds", "1", "--trials", "0", "--only", "two_stream segment k=8 int8"],
    "scaling": ["--steps", "6", "--only", "d=32"],
    "replicas": ["--steps", "4", "--seeds", "1", "--sum", "eden:4", "--lanes", "2"],
    "bandwidth": ["--steps", "1", "--speed", "50gflops"],
}


@pytest.mark.full
@pytest.mark.parametrize("command", in_order(("lab",)))
def test_lab_commands_write_their_numbers_and_their_picture(command, tmp_path):
    name, words = shlex.split(command)[2], shlex.split(command)[1:]
    words = [str(tmp_path / w) if w.endswith((".json", ".png")) else w for w in words]
    run([*words, *SHORT.get(name, ["--steps", "4"])])
    result = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert set(result) >= LAB_KEYS[name]
    assert (tmp_path / "out" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    if name == "optimizer":
        assert set(result["drift"]) == {"row_adamw", "muon", "adamw", "sign"}
    if name == "rank":
        assert set(result["stable_rank"]) == {"transformer", "cnn", "vit", "mixer"}
        for architecture, curves in result["stable_rank"].items():
            assert all(len(c) == len(result["at_steps"][architecture]) for c in curves.values())
    if name == "grassmann":
        assert result["verdict"] in ("stable", "oscillating")


def test_exit_codes_are_documented():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name, code in vars(errors).items():
        if name.startswith("EXIT_"):
            assert re.search(rf"^\| {code} \|", pages, re.MULTILINE), name


LAYERS = (  # each may import from those before it, and from its own
    {
        "errors",
        "files",
        "installing",
        "retry",
        "counter",
        "lazy",
        "plugins",
        "quantities",
        "safetensors_file",
        "timeouts",
    },
    {"protocol"},
    {"forms"},
    {"codecs"},
    {"spec"},
    {"cost"},
    {"data"},
    {"huggingface"},
    {"model"},
    {"wire"},
    {"observe"},
    {"coordinator"},
    {"worker"},
    {"doctor"},
    {"export"},
    {"inference"},
    {"launch"},
    {"bench"},
    {"lab"},
    {"cli"},
)
STRANGERS = {"forms": {"codecs"}, "codecs": {"forms"}, "worker": {"coordinator"}, "lab": {"coordinator"}}


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """The parts of the package that run with this code: what only the type checker reads is left out."""
    for node in body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from imported(node.orelse)
        elif isinstance(node, ast.ImportFrom) and node.module == "protomodels_cli":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            yield from (n.split(".")[1] for n in names if n.startswith("protomodels_cli."))
        else:
            for inner in ("body", "orelse", "finalbody", "handlers"):
                yield from imported(getattr(node, inner, []))


def test_layers_import_downwards_only():
    rank = {name: i for i, names in enumerate(LAYERS) for name in names}
    package = ROOT / "protomodels_cli"
    seen = set()
    for file in package.rglob("*.py"):
        layer = file.relative_to(package).parts[0].removesuffix(".py")
        if layer in rank:
            seen.add(layer)
            for used in imported(ast.parse(file.read_text()).body):
                assert rank.get(used, -1) <= rank[layer], f"{layer}/{file.name} imports {used}"
                assert used not in STRANGERS.get(layer, set()), f"{layer}/{file.name} imports {used}"
    assert {"protocol", "forms", "codecs", "spec", "cost"} <= seen


@pytest.mark.parametrize("room", ["protocol", "forms", "codecs", "spec", "cost", "data", "huggingface", "coordinator"])
def test_facts_need_no_torch(room):
    """Every module of the room is imported where torch cannot be."""
    program = f"""
import importlib, pkgutil, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("there is no torch here")
sys.meta_path.insert(0, Blocker())
import protomodels_cli.{room} as room
for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
    importlib.import_module(module.name)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    """As scripts/proto.sh makes it."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, *outputs, "proto/protomodels_cli/wire/pb/pmtrain.proto"], cwd=ROOT, check=True)
    made = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.py*"))
    assert len(made) == 3
    for file in made:
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes(), f"{file}: run scripts/proto.sh"


def test_other_messages_are_another_protocol():
    """So that a peer with other messages is refused by name. Raise PROTOCOL, and take over the hash."""
    messages = hashlib.sha256(pmtrain_pb2.DESCRIPTOR.serialized_pb).hexdigest()
    assert (PROTOCOL, messages) == (16, "9f8a19b7817dea40d00e20f3bf284793b844d85e50d1d03a29c9c5e5d6f83f80")


def test_every_rpc_has_a_comment():
    lines = (ROOT / "proto/protomodels_cli/wire/pb/pmtrain.proto").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if line.strip().startswith("rpc "):
            assert before.strip().startswith("//"), line


def test_the_table_of_speeds_is_that_of_its_results():
    """The page's figures are the committed run's, and what it claims of them holds."""
    found = json.loads((ROOT / "docs" / "results" / "wan.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {"none": "none", "80mbit,25ms": "80 Mbit/s", "10mbit,25ms": "10 Mbit/s", "5mbit,25ms": "5 Mbit/s"}
    for row in found["rows"]:
        what = f"dense {row['codec']}" if row["form"] == "dense" else f"reparam k = {row['k']}, {row['codec']}"
        cells = f"| {what} | {names[row['link']]} | {row['tokens_per_s']:.0f} | {row['bytes_per_token']:.1f} |"
        assert cells in page
    for row in found["torch_pipelining"]:
        what = f"torch {row['codec']} ({row['schedule']})"
        assert f"| {what} | {names[row['link']]} | {row['tokens_per_s']:.0f} | {row['bytes_per_token']:.0f} |" in page
    speed = {(r["form"], r["codec"], r["link"]): r["tokens_per_s"] for r in found["rows"]}
    torch = {(r["codec"], r["link"]): r["tokens_per_s"] for r in found["torch_pipelining"]}
    assert speed["reparam", "int8", "5mbit,25ms"] >= 5 * max(torch["bf16", "5mbit,25ms"], torch["fp32", "5mbit,25ms"])
    assert speed["dense", "bf16", "80mbit,25ms"] >= torch["bf16", "80mbit,25ms"]
