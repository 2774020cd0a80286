from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Presence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Presence]
    HERE: _ClassVar[Presence]
    AWAY: _ClassVar[Presence]
    LOST: _ClassVar[Presence]
    LEFT: _ClassVar[Presence]
    KICKED: _ClassVar[Presence]
    DISMISSED: _ClassVar[Presence]
UNKNOWN: Presence
HERE: Presence
AWAY: Presence
LOST: Presence
LEFT: Presence
KICKED: Presence
DISMISSED: Presence

class EnrolRequest(_message.Message):
    __slots__ = ("version", "protocol", "public_key_pem")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_PEM_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    public_key_pem: bytes
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., public_key_pem: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("peer", "secret", "certificate_pem", "spec_json", "spec_sha256", "clock", "packages", "version")
    class PackagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    SPEC_SHA256_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    secret: str
    certificate_pem: bytes
    spec_json: str
    spec_sha256: str
    clock: float
    packages: _containers.ScalarMap[str, str]
    version: str
    def __init__(self, peer: _Optional[str] = ..., secret: _Optional[str] = ..., certificate_pem: _Optional[bytes] = ..., spec_json: _Optional[str] = ..., spec_sha256: _Optional[str] = ..., clock: _Optional[float] = ..., packages: _Optional[_Mapping[str, str]] = ..., version: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("public_key_pem",)
    PUBLIC_KEY_PEM_FIELD_NUMBER: _ClassVar[int]
    public_key_pem: bytes
    def __init__(self, public_key_pem: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("secret", "certificate_pem")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    secret: str
    certificate_pem: bytes
    def __init__(self, secret: _Optional[str] = ..., certificate_pem: _Optional[bytes] = ...) -> None: ...

class MeasureRequest(_message.Message):
    __slots__ = ("padding", "size")
    PADDING_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    size: int
    def __init__(self, padding: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class MeasureReply(_message.Message):
    __slots__ = ("padding", "clock")
    PADDING_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    clock: float
    def __init__(self, padding: _Optional[bytes] = ..., clock: _Optional[float] = ...) -> None: ...

class ReachabilityRequest(_message.Message):
    __slots__ = ("port", "hosts", "outside_port", "outside_host")
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_PORT_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_HOST_FIELD_NUMBER: _ClassVar[int]
    port: int
    hosts: _containers.RepeatedScalarFieldContainer[str]
    outside_port: int
    outside_host: str
    def __init__(self, port: _Optional[int] = ..., hosts: _Optional[_Iterable[str]] = ..., outside_port: _Optional[int] = ..., outside_host: _Optional[str] = ...) -> None: ...

class ReachabilityReply(_message.Message):
    __slots__ = ("reachable", "host", "reason", "relays")
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    reachable: bool
    host: str
    reason: str
    relays: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reachable: bool = ..., host: _Optional[str] = ..., reason: _Optional[str] = ..., relays: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("register", "done", "basis_taken", "leaving", "trouble", "heartbeat", "part_failed", "snapshot_lost", "prefetched", "ready", "lacking", "proof", "verdict", "rest")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BASIS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PART_FAILED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LOST_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    register: Register
    done: Done
    basis_taken: BasisTaken
    leaving: Leaving
    trouble: Trouble
    heartbeat: Heartbeat
    part_failed: PartFailed
    snapshot_lost: SnapshotLost
    prefetched: Part
    ready: Part
    lacking: Part
    proof: Proof
    verdict: Verdict
    rest: Rest
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., basis_taken: _Optional[_Union[BasisTaken, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., trouble: _Optional[_Union[Trouble, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., part_failed: _Optional[_Union[PartFailed, _Mapping]] = ..., snapshot_lost: _Optional[_Union[SnapshotLost, _Mapping]] = ..., prefetched: _Optional[_Union[Part, _Mapping]] = ..., ready: _Optional[_Union[Part, _Mapping]] = ..., lacking: _Optional[_Union[Part, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., rest: _Optional[_Union[Rest, _Mapping]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("part", "nonce", "sha256")
    PART_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    part: Part
    nonce: bytes
    sha256: str
    def __init__(self, part: _Optional[_Union[Part, _Mapping]] = ..., nonce: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("audit", "compared", "failed")
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    audit: int
    compared: _containers.RepeatedCompositeFieldContainer[Comparison]
    failed: str
    def __init__(self, audit: _Optional[int] = ..., compared: _Optional[_Iterable[_Union[Comparison, _Mapping]]] = ..., failed: _Optional[str] = ...) -> None: ...

class Comparison(_message.Message):
    __slots__ = ("leg", "numbers", "wild")
    LEG_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    WILD_FIELD_NUMBER: _ClassVar[int]
    leg: Frame.Leg
    numbers: int
    wild: int
    def __init__(self, leg: _Optional[_Union[Frame.Leg, str]] = ..., numbers: _Optional[int] = ..., wild: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PartFailed(_message.Message):
    __slots__ = ("lineage", "step", "why", "stage")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    why: str
    stage: int
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., why: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class SnapshotLost(_message.Message):
    __slots__ = ("generation", "lineage", "step", "why")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    lineage: int
    step: int
    why: str
    def __init__(self, generation: _Optional[int] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("spec_sha256", "device", "memory", "flops", "host_memory", "port", "name", "holding", "parts", "dtype", "compiled", "card", "card_memory", "addresses", "machine", "relay_trips", "outside_port", "outside_host", "rest", "upload", "download")
    SPEC_SHA256_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    CARD_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    RELAY_TRIPS_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_PORT_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_HOST_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    spec_sha256: str
    device: str
    memory: int
    flops: float
    host_memory: int
    port: int
    name: str
    holding: Holding
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    dtype: str
    compiled: bool
    card: str
    card_memory: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    machine: str
    relay_trips: _containers.RepeatedCompositeFieldContainer[RelayTrip]
    outside_port: int
    outside_host: str
    rest: Rest
    upload: float
    download: float
    def __init__(self, spec_sha256: _Optional[str] = ..., device: _Optional[str] = ..., memory: _Optional[int] = ..., flops: _Optional[float] = ..., host_memory: _Optional[int] = ..., port: _Optional[int] = ..., name: _Optional[str] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., dtype: _Optional[str] = ..., compiled: bool = ..., card: _Optional[str] = ..., card_memory: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., machine: _Optional[str] = ..., relay_trips: _Optional[_Iterable[_Union[RelayTrip, _Mapping]]] = ..., outside_port: _Optional[int] = ..., outside_host: _Optional[str] = ..., rest: _Optional[_Union[Rest, _Mapping]] = ..., upload: _Optional[float] = ..., download: _Optional[float] = ...) -> None: ...

class RelayTrip(_message.Message):
    __slots__ = ("relay", "seconds")
    RELAY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    relay: str
    seconds: float
    def __init__(self, relay: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("lineage", "stage", "layers_per_stage", "applied", "prepared", "generation")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_PER_STAGE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    stage: int
    layers_per_stage: _containers.RepeatedScalarFieldContainer[int]
    applied: int
    prepared: int
    generation: int
    def __init__(self, lineage: _Optional[int] = ..., stage: _Optional[int] = ..., layers_per_stage: _Optional[_Iterable[int]] = ..., applied: _Optional[int] = ..., prepared: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("lineage", "step", "stage", "sha256")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    stage: int
    sha256: str
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., stage: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("task", "t_fixed_sha256", "t_fixed_version", "basis_sha256", "basis_version", "norms", "loss_sum", "tokens", "usage", "parameters", "generation", "recorded")
    TASK_FIELD_NUMBER: _ClassVar[int]
    T_FIXED_SHA256_FIELD_NUMBER: _ClassVar[int]
    T_FIXED_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASIS_SHA256_FIELD_NUMBER: _ClassVar[int]
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    task: int
    t_fixed_sha256: str
    t_fixed_version: int
    basis_sha256: str
    basis_version: int
    norms: _containers.RepeatedCompositeFieldContainer[UnitNorm]
    loss_sum: float
    tokens: int
    usage: Usage
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterHash]
    generation: int
    recorded: Recorded
    def __init__(self, task: _Optional[int] = ..., t_fixed_sha256: _Optional[str] = ..., t_fixed_version: _Optional[int] = ..., basis_sha256: _Optional[str] = ..., basis_version: _Optional[int] = ..., norms: _Optional[_Iterable[_Union[UnitNorm, _Mapping]]] = ..., loss_sum: _Optional[float] = ..., tokens: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., parameters: _Optional[_Iterable[_Union[ParameterHash, _Mapping]]] = ..., generation: _Optional[int] = ..., recorded: _Optional[_Union[Recorded, _Mapping]] = ...) -> None: ...

class Recorded(_message.Message):
    __slots__ = ("forward_in", "forward_out", "backward_in", "backward_out", "step")
    FORWARD_IN_FIELD_NUMBER: _ClassVar[int]
    FORWARD_OUT_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_IN_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_OUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    forward_in: _containers.RepeatedScalarFieldContainer[bytes]
    forward_out: _containers.RepeatedScalarFieldContainer[bytes]
    backward_in: _containers.RepeatedScalarFieldContainer[bytes]
    backward_out: _containers.RepeatedScalarFieldContainer[bytes]
    step: int
    def __init__(self, forward_in: _Optional[_Iterable[bytes]] = ..., forward_out: _Optional[_Iterable[bytes]] = ..., backward_in: _Optional[_Iterable[bytes]] = ..., backward_out: _Optional[_Iterable[bytes]] = ..., step: _Optional[int] = ...) -> None: ...

class UnitNorm(_message.Message):
    __slots__ = ("unit", "squared")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SQUARED_FIELD_NUMBER: _ClassVar[int]
    unit: str
    squared: float
    def __init__(self, unit: _Optional[str] = ..., squared: _Optional[float] = ...) -> None: ...

class ParameterHash(_message.Message):
    __slots__ = ("name", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("compute_s", "wait_s", "wire_s", "forward_bytes", "backward_bytes", "most_in_flight", "peak_memory", "cpu_s", "refused_frames", "forecast_memory", "reserved_memory", "round_trip_s", "path", "path_s", "grown_forward", "grown_backward", "punch", "celsius", "watts")
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FORECAST_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RESERVED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_S_FIELD_NUMBER: _ClassVar[int]
    GROWN_FORWARD_FIELD_NUMBER: _ClassVar[int]
    GROWN_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    PUNCH_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    compute_s: float
    wait_s: float
    wire_s: float
    forward_bytes: int
    backward_bytes: int
    most_in_flight: int
    peak_memory: int
    cpu_s: float
    refused_frames: int
    forecast_memory: int
    reserved_memory: int
    round_trip_s: float
    path: str
    path_s: float
    grown_forward: float
    grown_backward: float
    punch: str
    celsius: float
    watts: float
    def __init__(self, compute_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., forward_bytes: _Optional[int] = ..., backward_bytes: _Optional[int] = ..., most_in_flight: _Optional[int] = ..., peak_memory: _Optional[int] = ..., cpu_s: _Optional[float] = ..., refused_frames: _Optional[int] = ..., forecast_memory: _Optional[int] = ..., reserved_memory: _Optional[int] = ..., round_trip_s: _Optional[float] = ..., path: _Optional[str] = ..., path_s: _Optional[float] = ..., grown_forward: _Optional[float] = ..., grown_backward: _Optional[float] = ..., punch: _Optional[str] = ..., celsius: _Optional[float] = ..., watts: _Optional[float] = ...) -> None: ...

class BasisTaken(_message.Message):
    __slots__ = ("version", "sha256", "generation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    version: int
    sha256: str
    generation: int
    def __init__(self, version: _Optional[int] = ..., sha256: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Rest(_message.Message):
    __slots__ = ("over", "until", "by_owner")
    OVER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BY_OWNER_FIELD_NUMBER: _ClassVar[int]
    over: bool
    until: float
    by_owner: bool
    def __init__(self, over: bool = ..., until: _Optional[float] = ..., by_owner: bool = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("detail", "about", "generation", "kind", "seconds")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    detail: str
    about: int
    generation: int
    kind: str
    seconds: float
    def __init__(self, detail: _Optional[str] = ..., about: _Optional[int] = ..., generation: _Optional[int] = ..., kind: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("spare", "assignment", "turn", "feed", "basis", "dismissal", "wait", "keep", "heartbeat", "prepare", "addresses", "prove", "routes", "show", "audit", "paused", "number")
    SPARE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    DISMISSAL_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PROVE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SHOW_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    spare: Spare
    assignment: Assignment
    turn: Turn
    feed: Feed
    basis: NewBasis
    dismissal: Dismissal
    wait: Wait
    keep: Keep
    heartbeat: Heartbeat
    prepare: Assignment
    addresses: Addresses
    prove: Prove
    routes: Routes
    show: Show
    audit: Audit
    paused: Paused
    number: int
    def __init__(self, spare: _Optional[_Union[Spare, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., feed: _Optional[_Union[Feed, _Mapping]] = ..., basis: _Optional[_Union[NewBasis, _Mapping]] = ..., dismissal: _Optional[_Union[Dismissal, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., prepare: _Optional[_Union[Assignment, _Mapping]] = ..., addresses: _Optional[_Union[Addresses, _Mapping]] = ..., prove: _Optional[_Union[Prove, _Mapping]] = ..., routes: _Optional[_Union[Routes, _Mapping]] = ..., show: _Optional[_Union[Show, _Mapping]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Prove(_message.Message):
    __slots__ = ("part", "nonce")
    PART_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    part: Part
    nonce: bytes
    def __init__(self, part: _Optional[_Union[Part, _Mapping]] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Show(_message.Message):
    __slots__ = ("audit", "generation", "step", "microbatch", "boundary")
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    audit: int
    generation: int
    step: int
    microbatch: int
    boundary: int
    def __init__(self, audit: _Optional[int] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., boundary: _Optional[int] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("audit", "stage", "step", "microbatch", "noise", "size", "sha256")
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    audit: int
    stage: Assignment
    step: int
    microbatch: int
    noise: float
    size: int
    sha256: str
    def __init__(self, audit: _Optional[int] = ..., stage: _Optional[_Union[Assignment, _Mapping]] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., noise: _Optional[float] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Audited(_message.Message):
    __slots__ = ("ids", "before", "behind")
    IDS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    before: Crossing
    behind: Crossing
    def __init__(self, ids: _Optional[bytes] = ..., before: _Optional[_Union[Crossing, _Mapping]] = ..., behind: _Optional[_Union[Crossing, _Mapping]] = ...) -> None: ...

class Crossing(_message.Message):
    __slots__ = ("forward", "backward")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    forward: Carried
    backward: Carried
    def __init__(self, forward: _Optional[_Union[Carried, _Mapping]] = ..., backward: _Optional[_Union[Carried, _Mapping]] = ...) -> None: ...

class Carried(_message.Message):
    __slots__ = ("basis_version", "ids", "payload", "poison")
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    POISON_FIELD_NUMBER: _ClassVar[int]
    basis_version: int
    ids: bytes
    payload: bytes
    poison: bool
    def __init__(self, basis_version: _Optional[int] = ..., ids: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., poison: bool = ...) -> None: ...

class Addresses(_message.Message):
    __slots__ = ("hosts",)
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class Spare(_message.Message):
    __slots__ = ("why", "kind")
    WHY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    why: str
    kind: str
    def __init__(self, why: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ("why", "kind")
    WHY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    why: str
    kind: str
    def __init__(self, why: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("why", "kind")
    WHY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    why: str
    kind: str
    def __init__(self, why: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("complete", "begun", "newest")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    complete: _containers.RepeatedCompositeFieldContainer[SnapshotName]
    begun: _containers.RepeatedCompositeFieldContainer[SnapshotName]
    newest: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, complete: _Optional[_Iterable[_Union[SnapshotName, _Mapping]]] = ..., begun: _Optional[_Iterable[_Union[SnapshotName, _Mapping]]] = ..., newest: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class SnapshotName(_message.Message):
    __slots__ = ("lineage", "step")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("task", "generation", "stage", "layers_per_stage", "basis", "t_fixed", "previous", "next", "lineage", "step", "reuse", "decision", "restore", "owed", "memory")
    TASK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_PER_STAGE_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    T_FIXED_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    task: int
    generation: int
    stage: int
    layers_per_stage: _containers.RepeatedScalarFieldContainer[int]
    basis: Basis
    t_fixed: Table
    previous: _containers.RepeatedCompositeFieldContainer[Route]
    next: _containers.RepeatedCompositeFieldContainer[Route]
    lineage: int
    step: int
    reuse: bool
    decision: Decision
    restore: Restore
    owed: int
    memory: int
    def __init__(self, task: _Optional[int] = ..., generation: _Optional[int] = ..., stage: _Optional[int] = ..., layers_per_stage: _Optional[_Iterable[int]] = ..., basis: _Optional[_Union[Basis, _Mapping]] = ..., t_fixed: _Optional[_Union[Table, _Mapping]] = ..., previous: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., next: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., lineage: _Optional[int] = ..., step: _Optional[int] = ..., reuse: bool = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., owed: _Optional[int] = ..., memory: _Optional[int] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("lineage", "step", "sha256")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    sha256: str
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Basis(_message.Message):
    __slots__ = ("version", "u", "sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    U_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    version: int
    u: bytes
    sha256: str
    def __init__(self, version: _Optional[int] = ..., u: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("seed", "scale", "version", "sha256")
    SEED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    seed: int
    scale: float
    version: int
    sha256: str
    def __init__(self, seed: _Optional[int] = ..., scale: _Optional[float] = ..., version: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("way", "peer", "ticket", "candidates", "relays", "unlikely")
    class Way(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LISTEN: _ClassVar[Route.Way]
        DIAL: _ClassVar[Route.Way]
    LISTEN: Route.Way
    DIAL: Route.Way
    WAY_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    UNLIKELY_FIELD_NUMBER: _ClassVar[int]
    way: Route.Way
    peer: str
    ticket: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    relays: _containers.RepeatedCompositeFieldContainer[Relay]
    unlikely: bool
    def __init__(self, way: _Optional[_Union[Route.Way, str]] = ..., peer: _Optional[str] = ..., ticket: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., relays: _Optional[_Iterable[_Union[Relay, _Mapping]]] = ..., unlikely: bool = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("host", "port", "kind")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    kind: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class Relay(_message.Message):
    __slots__ = ("host", "port", "ticket")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    ticket: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., ticket: _Optional[str] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("generation", "previous", "next")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    previous: _containers.RepeatedCompositeFieldContainer[Route]
    next: _containers.RepeatedCompositeFieldContainer[Route]
    def __init__(self, generation: _Optional[int] = ..., previous: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., next: _Optional[_Iterable[_Union[Route, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("task", "generation", "decision", "step", "evaluation", "sync", "finish", "connect", "save")
    TASK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    task: int
    generation: int
    decision: Decision
    step: Step
    evaluation: Evaluation
    sync: Sync
    finish: Finish
    connect: Connect
    save: bool
    def __init__(self, task: _Optional[int] = ..., generation: _Optional[int] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., sync: _Optional[_Union[Sync, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., save: bool = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Decision(_message.Message):
    __slots__ = ("step", "apply", "lr", "clip", "loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    apply: bool
    lr: float
    clip: float
    loss: float
    def __init__(self, step: _Optional[int] = ..., apply: bool = ..., lr: _Optional[float] = ..., clip: _Optional[float] = ..., loss: _Optional[float] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "microbatches", "basis_version", "record")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    step: int
    microbatches: int
    basis_version: int
    record: bool
    def __init__(self, step: _Optional[int] = ..., microbatches: _Optional[int] = ..., basis_version: _Optional[int] = ..., record: bool = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "microbatches", "basis_version")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    step: int
    microbatches: int
    basis_version: int
    def __init__(self, step: _Optional[int] = ..., microbatches: _Optional[int] = ..., basis_version: _Optional[int] = ...) -> None: ...

class Sync(_message.Message):
    __slots__ = ("step", "basis_version", "basis_sha256", "t_fixed_sha256")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASIS_SHA256_FIELD_NUMBER: _ClassVar[int]
    T_FIXED_SHA256_FIELD_NUMBER: _ClassVar[int]
    step: int
    basis_version: int
    basis_sha256: str
    t_fixed_sha256: str
    def __init__(self, step: _Optional[int] = ..., basis_version: _Optional[int] = ..., basis_sha256: _Optional[str] = ..., t_fixed_sha256: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Feed(_message.Message):
    __slots__ = ("step", "microbatch", "evaluation", "ids")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    microbatch: int
    evaluation: bool
    ids: bytes
    def __init__(self, step: _Optional[int] = ..., microbatch: _Optional[int] = ..., evaluation: bool = ..., ids: _Optional[bytes] = ...) -> None: ...

class NewBasis(_message.Message):
    __slots__ = ("basis",)
    BASIS_FIELD_NUMBER: _ClassVar[int]
    basis: Basis
    def __init__(self, basis: _Optional[_Union[Basis, _Mapping]] = ...) -> None: ...

class Dismissal(_message.Message):
    __slots__ = ("why", "fix", "exit_code", "kind")
    WHY_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    why: str
    fix: str
    exit_code: int
    kind: str
    def __init__(self, why: _Optional[str] = ..., fix: _Optional[str] = ..., exit_code: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("kind", "generation", "step", "size", "sha256", "row_json", "moved", "lineage", "stage", "offset", "direct", "audit")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SNAPSHOT_PART: _ClassVar[UploadHeader.Kind]
        BASIS: _ClassVar[UploadHeader.Kind]
        FRAMES: _ClassVar[UploadHeader.Kind]
    SNAPSHOT_PART: UploadHeader.Kind
    BASIS: UploadHeader.Kind
    FRAMES: UploadHeader.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    kind: UploadHeader.Kind
    generation: int
    step: int
    size: int
    sha256: str
    row_json: str
    moved: bool
    lineage: int
    stage: int
    offset: int
    direct: bool
    audit: int
    def __init__(self, kind: _Optional[_Union[UploadHeader.Kind, str]] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ..., row_json: _Optional[str] = ..., moved: bool = ..., lineage: _Optional[int] = ..., stage: _Optional[int] = ..., offset: _Optional[int] = ..., direct: bool = ..., audit: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("clock",)
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    clock: float
    def __init__(self, clock: _Optional[float] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("wanted", "offset", "url", "stored")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    wanted: bool
    offset: int
    url: str
    stored: bool
    def __init__(self, wanted: bool = ..., offset: _Optional[int] = ..., url: _Optional[str] = ..., stored: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lineage", "step", "stage", "offset", "size", "audit")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    stage: int
    offset: int
    size: int
    audit: int
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., stage: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., audit: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data", "clock")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    clock: float
    def __init__(self, data: _Optional[bytes] = ..., clock: _Optional[float] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("leg", "generation", "step", "microbatch", "basis_version", "ids", "size", "taken", "poison", "came", "asked", "answered", "punch")
    class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CREDIT: _ClassVar[Frame.Leg]
        FORWARD: _ClassVar[Frame.Leg]
        BACKWARD: _ClassVar[Frame.Leg]
        EVALUATION: _ClassVar[Frame.Leg]
    CREDIT: Frame.Leg
    FORWARD: Frame.Leg
    BACKWARD: Frame.Leg
    EVALUATION: Frame.Leg
    LEG_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    POISON_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    PUNCH_FIELD_NUMBER: _ClassVar[int]
    leg: Frame.Leg
    generation: int
    step: int
    microbatch: int
    basis_version: int
    ids: bytes
    size: int
    taken: int
    poison: bool
    came: int
    asked: int
    answered: int
    punch: Punch
    def __init__(self, leg: _Optional[_Union[Frame.Leg, str]] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., basis_version: _Optional[int] = ..., ids: _Optional[bytes] = ..., size: _Optional[int] = ..., taken: _Optional[int] = ..., poison: bool = ..., came: _Optional[int] = ..., asked: _Optional[int] = ..., answered: _Optional[int] = ..., punch: _Optional[_Union[Punch, _Mapping]] = ...) -> None: ...

class Punch(_message.Message):
    __slots__ = ("number", "host", "port", "why")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    number: int
    host: str
    port: int
    why: str
    def __init__(self, number: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class RestRequest(_message.Message):
    __slots__ = ("peer", "over")
    PEER_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    over: bool
    def __init__(self, peer: _Optional[str] = ..., over: bool = ...) -> None: ...

class RestReply(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("uses", "seconds", "person")
    USES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PERSON_FIELD_NUMBER: _ClassVar[int]
    uses: int
    seconds: float
    person: str
    def __init__(self, uses: _Optional[int] = ..., seconds: _Optional[float] = ..., person: _Optional[str] = ...) -> None: ...

class CreateTokenReply(_message.Message):
    __slots__ = ("id", "token")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: str
    token: str
    def __init__(self, id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokensReply(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenStatus]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenStatus, _Mapping]]] = ...) -> None: ...

class TokenStatus(_message.Message):
    __slots__ = ("id", "made", "expires", "uses", "used", "peers", "ended", "person")
    ID_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PERSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    made: float
    expires: float
    uses: int
    used: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    ended: str
    person: str
    def __init__(self, id: _Optional[str] = ..., made: _Optional[float] = ..., expires: _Optional[float] = ..., uses: _Optional[int] = ..., used: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., ended: _Optional[str] = ..., person: _Optional[str] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RevokeTokenReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class KickRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class KickReply(_message.Message):
    __slots__ = ("peer", "revoked", "token")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    peer: str
    revoked: str
    token: str
    def __init__(self, peer: _Optional[str] = ..., revoked: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("action",)
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[ControlRequest.Action]
        RESUME: _ClassVar[ControlRequest.Action]
        STOP: _ClassVar[ControlRequest.Action]
        PAUSE: _ClassVar[ControlRequest.Action]
    UNSPECIFIED: ControlRequest.Action
    RESUME: ControlRequest.Action
    STOP: ControlRequest.Action
    PAUSE: ControlRequest.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    action: ControlRequest.Action
    def __init__(self, action: _Optional[_Union[ControlRequest.Action, str]] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("name", "phase", "waiting_for", "step", "steps", "loss", "eval_loss", "tokens_per_s", "eta_s", "generation", "basis_version", "stages", "peers", "spec_sha256", "reason", "uptime_s", "tokens", "refused_connections", "waiting_s", "lineage", "snapshot_step", "steps_redone", "rollbacks", "waiting_kind", "reason_kind", "trouble", "trouble_kind", "checkpoint", "checkpoint_sha256", "crash_redo_s", "crash_restore_s", "started", "tokens_total", "contributions", "gone", "no_spare")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[RunStatus.Phase]
        WAITING_FOR_PEERS: _ClassVar[RunStatus.Phase]
        ASSIGNING: _ClassVar[RunStatus.Phase]
        RUNNING: _ClassVar[RunStatus.Phase]
        WAITING: _ClassVar[RunStatus.Phase]
        PAUSED: _ClassVar[RunStatus.Phase]
        DONE: _ClassVar[RunStatus.Phase]
        NOT_RUNNING: _ClassVar[RunStatus.Phase]
    UNSPECIFIED: RunStatus.Phase
    WAITING_FOR_PEERS: RunStatus.Phase
    ASSIGNING: RunStatus.Phase
    RUNNING: RunStatus.Phase
    WAITING: RunStatus.Phase
    PAUSED: RunStatus.Phase
    DONE: RunStatus.Phase
    NOT_RUNNING: RunStatus.Phase
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASIS_VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SPEC_SHA256_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_REDONE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_KIND_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_KIND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    CRASH_REDO_S_FIELD_NUMBER: _ClassVar[int]
    CRASH_RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    NO_SPARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    phase: RunStatus.Phase
    waiting_for: str
    step: int
    steps: int
    loss: float
    eval_loss: float
    tokens_per_s: float
    eta_s: float
    generation: int
    basis_version: int
    stages: _containers.RepeatedCompositeFieldContainer[StageStatus]
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    spec_sha256: str
    reason: str
    uptime_s: float
    tokens: int
    refused_connections: int
    waiting_s: float
    lineage: int
    snapshot_step: int
    steps_redone: int
    rollbacks: int
    waiting_kind: str
    reason_kind: str
    trouble: str
    trouble_kind: str
    checkpoint: str
    checkpoint_sha256: str
    crash_redo_s: float
    crash_restore_s: float
    started: float
    tokens_total: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    gone: _containers.RepeatedCompositeFieldContainer[GonePeer]
    no_spare: bool
    def __init__(self, name: _Optional[str] = ..., phase: _Optional[_Union[RunStatus.Phase, str]] = ..., waiting_for: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., eval_loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., generation: _Optional[int] = ..., basis_version: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageStatus, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., spec_sha256: _Optional[str] = ..., reason: _Optional[str] = ..., uptime_s: _Optional[float] = ..., tokens: _Optional[int] = ..., refused_connections: _Optional[int] = ..., waiting_s: _Optional[float] = ..., lineage: _Optional[int] = ..., snapshot_step: _Optional[int] = ..., steps_redone: _Optional[int] = ..., rollbacks: _Optional[int] = ..., waiting_kind: _Optional[str] = ..., reason_kind: _Optional[str] = ..., trouble: _Optional[str] = ..., trouble_kind: _Optional[str] = ..., checkpoint: _Optional[str] = ..., checkpoint_sha256: _Optional[str] = ..., crash_redo_s: _Optional[float] = ..., crash_restore_s: _Optional[float] = ..., started: _Optional[float] = ..., tokens_total: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[GonePeer, _Mapping]]] = ..., no_spare: bool = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("name", "steps", "tokens", "seconds", "sent_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    steps: int
    tokens: int
    seconds: float
    sent_bytes: int
    def __init__(self, name: _Optional[str] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class GonePeer(_message.Message):
    __slots__ = ("peer", "name", "how", "gone_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    GONE_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    how: Presence
    gone_s: float
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., how: _Optional[_Union[Presence, str]] = ..., gone_s: _Optional[float] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("peer", "name", "presence")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    presence: Presence
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., presence: _Optional[_Union[Presence, str]] = ...) -> None: ...

class StageStatus(_message.Message):
    __slots__ = ("stage", "first_layer", "end_layer", "holders", "state", "compute_share", "wait_share", "wire_share", "forward_bytes_per_token", "backward_bytes_per_token", "ratio_bf16", "most_in_flight", "peak_memory", "forecast_memory", "round_trip_s", "path", "path_why", "path_kind", "path_s", "punch", "process_memory", "celsius", "watts")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[StageStatus.State]
        LOST: _ClassVar[StageStatus.State]
        WAITING: _ClassVar[StageStatus.State]
        BUILDING: _ClassVar[StageStatus.State]
        LINKING: _ClassVar[StageStatus.State]
        TRAINING: _ClassVar[StageStatus.State]
        CHECKING: _ClassVar[StageStatus.State]
        EVALUATING: _ClassVar[StageStatus.State]
        FINISHING: _ClassVar[StageStatus.State]
    UNSPECIFIED: StageStatus.State
    LOST: StageStatus.State
    WAITING: StageStatus.State
    BUILDING: StageStatus.State
    LINKING: StageStatus.State
    TRAINING: StageStatus.State
    CHECKING: StageStatus.State
    EVALUATING: StageStatus.State
    FINISHING: StageStatus.State
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SHARE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    WIRE_SHARE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RATIO_BF16_FIELD_NUMBER: _ClassVar[int]
    MOST_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_FIELD_NUMBER: _ClassVar[int]
    FORECAST_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_WHY_FIELD_NUMBER: _ClassVar[int]
    PATH_KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_S_FIELD_NUMBER: _ClassVar[int]
    PUNCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    first_layer: int
    end_layer: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    state: StageStatus.State
    compute_share: float
    wait_share: float
    wire_share: float
    forward_bytes_per_token: float
    backward_bytes_per_token: float
    ratio_bf16: float
    most_in_flight: int
    peak_memory: int
    forecast_memory: int
    round_trip_s: float
    path: str
    path_why: str
    path_kind: str
    path_s: float
    punch: str
    process_memory: bool
    celsius: float
    watts: float
    def __init__(self, stage: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., state: _Optional[_Union[StageStatus.State, str]] = ..., compute_share: _Optional[float] = ..., wait_share: _Optional[float] = ..., wire_share: _Optional[float] = ..., forward_bytes_per_token: _Optional[float] = ..., backward_bytes_per_token: _Optional[float] = ..., ratio_bf16: _Optional[float] = ..., most_in_flight: _Optional[int] = ..., peak_memory: _Optional[int] = ..., forecast_memory: _Optional[int] = ..., round_trip_s: _Optional[float] = ..., path: _Optional[str] = ..., path_why: _Optional[str] = ..., path_kind: _Optional[str] = ..., path_s: _Optional[float] = ..., punch: _Optional[str] = ..., process_memory: bool = ..., celsius: _Optional[float] = ..., watts: _Optional[float] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer", "name", "state", "stage", "device", "memory", "flops", "address", "reachable", "joined_s", "rests_until", "upload", "download", "rests_by_itself", "outsized", "token", "person")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[PeerStatus.State]
        SPARE: _ClassVar[PeerStatus.State]
        HOLDING: _ClassVar[PeerStatus.State]
        LEAVING: _ClassVar[PeerStatus.State]
        UNPLACED: _ClassVar[PeerStatus.State]
        RESTING: _ClassVar[PeerStatus.State]
    UNSPECIFIED: PeerStatus.State
    SPARE: PeerStatus.State
    HOLDING: PeerStatus.State
    LEAVING: PeerStatus.State
    UNPLACED: PeerStatus.State
    RESTING: PeerStatus.State
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    JOINED_S_FIELD_NUMBER: _ClassVar[int]
    RESTS_UNTIL_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    RESTS_BY_ITSELF_FIELD_NUMBER: _ClassVar[int]
    OUTSIZED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PERSON_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    state: PeerStatus.State
    stage: int
    device: str
    memory: int
    flops: float
    address: str
    reachable: bool
    joined_s: float
    rests_until: float
    upload: float
    download: float
    rests_by_itself: bool
    outsized: int
    token: str
    person: str
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[PeerStatus.State, str]] = ..., stage: _Optional[int] = ..., device: _Optional[str] = ..., memory: _Optional[int] = ..., flops: _Optional[float] = ..., address: _Optional[str] = ..., reachable: bool = ..., joined_s: _Optional[float] = ..., rests_until: _Optional[float] = ..., upload: _Optional[float] = ..., download: _Optional[float] = ..., rests_by_itself: bool = ..., outsized: _Optional[int] = ..., token: _Optional[str] = ..., person: _Optional[str] = ...) -> None: ...
