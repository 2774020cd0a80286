"""What `--format json` prints, one model for each command: for documents and tests. Commands print plain data.

The status is the protocol's own message; its model is made from that, so that a new field is here by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel, ConfigDict, Field, create_model

from protomodels_cli.cli import on_disk
from protomodels_cli.cli.outlook import Outlook
from protomodels_cli.cost.audits import Auditing
from protomodels_cli.cost.forecast import Estimate
from protomodels_cli.cost.forecast import Forecast as CostForecast
from protomodels_cli.cost.sizes import ModelSize
from protomodels_cli.doctor.facts import Contact, Machine
from protomodels_cli.doctor.findings import Finding, Severity
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


class Strict(BaseModel):
    """Nothing but these fields, of these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _model_of(message: Descriptor) -> type[BaseModel]:
    """The model of what observe/fields.py makes of such a message."""
    fields: dict[str, Any] = {}
    for field in message.fields:
        kind: Any = _type_of(field)
        if field.is_repeated:
            fields[field.name] = list[kind], ...
        elif field.has_presence and field.message_type is None:
            fields[field.name] = kind, Field(default=None)
        else:
            fields[field.name] = kind, ...
    return create_model(message.name, __base__=Strict, **fields)


def _type_of(field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _model_of(field.message_type)
    if field.enum_type is not None:
        return Literal[tuple(name.lower() for name in field.enum_type.values_by_name)]
    whole = (field.CPPTYPE_INT32, field.CPPTYPE_INT64, field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
    if field.cpp_type in whole:
        return int
    return {field.CPPTYPE_STRING: str, field.CPPTYPE_BOOL: bool}.get(field.cpp_type, float)


RunStatus = _model_of(pb.RunStatus.DESCRIPTOR)
PeerStatus = _model_of(pb.PeerStatus.DESCRIPTOR)
TokenStatus = _model_of(pb.TokenStatus.DESCRIPTOR)


class Peers(Strict):
    peers: list[PeerStatus]  # type: ignore[valid-type]


class Tokens(Strict):
    """The tokens themselves are in none of it: the run has their hashes alone."""

    tokens: list[TokenStatus]  # type: ignore[valid-type]


class Invitation(Strict):
    run: str
    address: str = Field(description="from which pmtrain is installed")
    join: str = Field(description="the command that joins, for those who have pmtrain")
    install: dict[str, list[str]] = Field(description="lines by tool: `pip`, `uv`, `pipx`")
    blocks: dict[str, str] = Field(description="by tool: what installs and joins, to paste at once")
    guest: str | None = Field(description="the friend that it is for; null: for everybody")
    token: str | None = Field(description="the id of the friend's own token; null: it is the run's own")


class NewToken(Strict):
    """The only time that the token is shown."""

    id: str
    person: str | None = Field(description="whom it is for; null: nobody was named")
    uses: int = Field(description="how many peers may join with it")
    seconds: float | None = Field(description="for which it can be joined with; null: until it is revoked")
    join: str = Field(description="the command")


class Export(Strict):
    run: str
    step: int
    steps: int
    folder: str
    parameters: int
    dtype: str
    files: int = Field(description="of weights")
    size: int = Field(description="bytes of all files")
    weights_sha256: str = Field(description="of the run's own parameters, as the run prints it")
    seconds: float


class Evaluation(Strict):
    model: str
    step: int | None = Field(description="of the snapshot; null: an exported folder")
    data: list[str] | None = Field(description="null: the run's held-out windows")
    loss: float = Field(description="nats per token")
    perplexity: float | None = Field(description="null: too large for a number")
    bits_per_byte: float | None = Field(description="null: the data are ids, or have no bytes of their own")
    tokens: int
    bytes: int | None
    windows: int
    context: int
    device: str
    dtype: str
    seconds: float


class Run(Strict):
    kind: on_disk.Kind = Field(description="`run`: led here; `peer`: joined here; `reference`, `model`: an export")
    name: str = Field(description="which commands take in place of the path, unless it is a model")
    path: str
    state: on_disk.State
    step: int | None = Field(description="the last one; null: none is known")
    steps: int | None
    bytes: int = Field(description="of all files in it")
    last_activity: float = Field(description="seconds since 1970")


class Runs(Strict):
    runs: list[Run]


class Event(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # the fields of its kind

    kind: str = Field(description="what happened; all are in `coordinator/notices.py`, `worker/notices.py`")
    text: str = Field(description="the sentence that the terminal showed; it may change")
    at: float = Field(description="seconds since 1970")


class LogLine(Strict):
    at: str = Field(description="UTC; empty, with level and logger, where a line is not of the log's form")
    level: Literal["debug", "info", "warning", "error", "critical", ""]
    logger: str
    text: str = Field(description="several lines where it is a traceback")


class Problem(Strict):
    field: str = Field(description="its dotted path; empty: the file as a whole")
    rule: str
    fix: str
    value: Any = Field(description="what the file has there")
    file: str
    line: int = Field(description="0: unknown")
    kind: str = Field(description="names the rule for programs")


class BytesPerToken(Strict):
    forward: float
    backward: float
    dense_bf16_each_way: float


class GoodFile(Strict):
    file: str
    ok: Literal[True]
    sha256: str = Field(description="of the spec as resolved")
    layers_per_stage: list[int]
    parameters_per_stage: list[int]
    t_fixed_bytes_per_stage: int
    boundary_bytes_per_token: BytesPerToken


class BadFile(Strict):
    file: str
    ok: Literal[False]
    problems: list[Problem]


class Validation(Strict):
    files: list[GoodFile | BadFile]


class Crossing(Strict):
    form: str
    k: int
    anchor: str
    codec: str
    expected_loss: float | None = Field(description="above dense's, as a share of it; null: not measured")


class DoctorFacts(Strict):
    machine: Machine
    coordinator: Contact | None = Field(description="null: without a link")


class Doctor(Strict):
    severity: Severity = Field(description="the worst of the findings'")
    findings: list[Finding]
    facts: DoctorFacts


@dataclass(frozen=True)
class Chosen(Estimate):
    """A forecast, and of what."""

    form: str
    k: int
    anchor: str
    codec: str
    expected_loss: float | None  # above dense's, as a share of it
    keeps_up: bool  # the link makes a step at most 10 % longer
    fits: bool  # into --memory


class Snapshots(Strict):
    part_bytes: int = Field(description="of the largest part")
    snapshot_bytes: int
    disk_bytes: int = Field(description="on the coordinator, of all that are there at one time")
    upload_seconds: float
    interval_seconds: float | None = Field(description="between two snapshots; null: only one, at the end")
    by: Literal["steps", "every", "failures"] = Field(description="what the interval follows from")
    redo_seconds: float = Field(description="after a crash, on average")
    restore_seconds: float


class Plan(Strict):
    link: str = Field(description="with a delay, also where --link says none")
    flops: float = Field(description="of every peer, a second: measured, --speed, or the --card's")
    outlook: Outlook
    size: ModelSize
    dense_size: ModelSize = Field(description="of the dense model of equal shape")
    anchor_bytes: int = Field(description="of one trained anchor")
    forecast: CostForecast
    choices: list[Chosen] = Field(description="the same run with other ways to cross the boundaries")
    recommended: Crossing | None = Field(description="at dense's loss soonest, of what fits; null: nothing fits")
    snapshots: Snapshots
    audit: Auditing | None = Field(description="what audits cost; null: there are none")


class Init(Strict):
    file: str = Field(description="the spec that was written")
    link: str = Field(description="with a delay, also where --link says none")
    peers: int
    spares: int = Field(description="peers without a stage: with more stages the run would take longer")
    memory: int = Field(description="bytes of every peer: --memory, the --card's, or assumed")
    flops: float = Field(description="of every peer, a second: --speed, the --card's, or assumed")
    outlook: Outlook
    forecast: CostForecast
    chosen: Crossing


@dataclass(frozen=True)
class Printed:
    """`lines`: one object a line, as many as there are; otherwise one object."""

    model: type[BaseModel]
    lines: bool = False


PRINTED: dict[str, Printed] = {
    "status": Printed(RunStatus),
    "top": Printed(RunStatus, lines=True),
    "peers": Printed(Peers),
    "invite": Printed(Invitation),
    "token create": Printed(NewToken),
    "token list": Printed(Tokens),
    "export": Printed(Export),
    "eval": Printed(Evaluation),
    "events": Printed(Event, lines=True),
    "logs": Printed(LogLine, lines=True),
    "runs": Printed(Runs),
    "validate": Printed(Validation),
    "init": Printed(Init),
    "plan": Printed(Plan),
    "doctor": Printed(Doctor),
}
