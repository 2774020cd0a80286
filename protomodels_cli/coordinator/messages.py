"""Between the machine's words and protobuf's. Pure; limits on what comes from outside are held here."""

from __future__ import annotations

from protomodels_cli.coordinator.history import Decided
from protomodels_cli.coordinator.state import Hashes, Peer, Report, State, Task
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

MOST_PARAMETERS = 100_000
MOST_TEXT = 400  # characters of anything that a peer says for people to read


def clean(text: str) -> str:
    """One printable line, and not a long one."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT]).strip()


def report_of(done: pb.Done, spec: RunSpec) -> Report:
    """Raises ValueError on what no honest stage says."""
    if len(done.norms) > spec.model.layers + 2 or len(done.parameters) > MOST_PARAMETERS:
        raise ValueError("a report with more parts than the model has")
    if any(n.squared < 0 for n in done.norms):
        raise ValueError("a squared norm below zero")
    used = done.usage
    return Report(
        hashes=Hashes(done.basis_version, done.basis_sha256, done.t_fixed_version, done.t_fixed_sha256)
        if done.basis_sha256
        else None,
        norms=tuple((n.unit, n.squared) for n in done.norms),
        loss_sum=done.loss_sum,
        tokens=done.tokens,
        parameters=tuple((p.name, p.sha256) for p in done.parameters),
        not_saved=clean(done.not_saved),
        usage={
            "compute_s": used.compute_s,
            "wait_s": used.wait_s,
            "wire_s": used.wire_s,
            "forward_bytes": used.forward_bytes,
            "backward_bytes": used.backward_bytes,
            "most_in_flight": used.most_in_flight,
            "peak_memory": used.peak_memory,
            "cpu_s": used.cpu_s,
            "refused_frames": used.refused_frames,
        },
    )


def peer_of(peer_id: str, register: pb.Register, address: str, reached: bool, now: float) -> Peer:
    """`reached`: we have dialled it at this address and port ourselves. It does not choose what others dial."""
    return Peer(
        id=peer_id,
        name=clean(register.name)[:64] or peer_id,
        device=clean(register.device)[:64],
        memory=register.memory,
        flops=register.flops,
        address=address,
        host=address if reached else "",
        port=register.port,
        since=now,
    )


def turn_message(state: State, decision: Decided | None, task: Task | None, evaluation_microbatches: int) -> pb.Turn:
    turn = pb.Turn(generation=state.history.generation)
    if decision is not None:
        d = decision
        turn.decision.CopyFrom(pb.Decision(step=d.step, apply=d.apply, lr=d.lr, clip=d.clip, loss=d.loss))
    if task is None:
        return turn
    turn.task = task.number
    version, _ = state.history.basis_for(task.step)
    match task.kind:
        case "link":
            turn.connect.SetInParent()
        case "step":
            microbatches = state.spec.batch.microbatches
            turn.step.CopyFrom(pb.Step(step=task.step, microbatches=microbatches, basis_version=version))
        case "evaluation":
            turn.evaluation.CopyFrom(
                pb.Evaluation(step=task.step, microbatches=evaluation_microbatches, basis_version=version)
            )
        case "sync":
            turn.sync.step = task.step
        case "save":
            turn.save.step = task.step
        case "finish":
            turn.finish.step = task.step
        case "place":
            raise AssertionError("a place is sent to each peer by itself")
    return turn


def route_pair(previous: Peer, following: Peer, ticket: str, relayed: bool) -> tuple[pb.Route, pb.Route]:
    """How the earlier stage reaches the later one, and the other way round. Whoever can be dialled, is."""
    way = pb.Route
    if relayed or not (previous.host or following.host):
        return (
            pb.Route(way=way.RELAY_DIAL, peer=following.id, ticket=ticket),
            pb.Route(way=way.RELAY_LISTEN, peer=previous.id, ticket=ticket),
        )
    if following.host:
        dials = pb.Route(way=way.DIAL, peer=following.id, host=following.host, port=following.port)
        return dials, pb.Route(way=way.LISTEN, peer=previous.id)
    dials = pb.Route(way=way.DIAL, peer=previous.id, host=previous.host, port=previous.port)
    return pb.Route(way=way.LISTEN, peer=following.id), dials
