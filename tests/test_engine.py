"""The compute thread by itself: what it takes from its inbox, and what it refuses."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import corpus_of, make_spec
from waiting import PATIENCE, wait_for

from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.model.basis import initial_basis
from protomodels_cli.model.shape import slices
from protomodels_cli.model.stage import Stage
from protomodels_cli.model.state import parameter_hashes
from protomodels_cli.protocol.messages import BadMessage, OutOfOrder
from protomodels_cli.wire.frames import Message
from protomodels_cli.worker import notices, orders
from protomodels_cli.worker.device import is_out_of_memory
from protomodels_cli.worker.engine import Engine, Outbox
from protomodels_cli.worker.orders import WrongOrder
from protomodels_cli.worker.stage_work import Pending, StageWork


class Posts(queue.Queue[tuple[int, Any]]):
    def post(self, generation: int, item: Any) -> None:
        self.put((generation, item))

    def until(self, kind: type) -> list[Any]:
        """What was posted, up to the first of this kind."""
        got: list[Any] = []
        while not got or not isinstance(got[-1], kind):
            try:
                got.append(self.get(timeout=PATIENCE)[1])
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} within {PATIENCE:g} s, only {got}") from None
        return got

    def is_quiet(self) -> bool:
        try:
            self.get(timeout=0.3)
        except queue.Empty:
            return True
        return False


SPEC = make_spec(stages=2, subspace={"form": "dense"})
LAYOUT = [(torch.device("cpu"), slices(SPEC)[0].layers)]


@pytest.fixture
def first_stage() -> Iterator[tuple[Engine, Posts]]:
    """Stage 0 of two in generation 1, with nothing to do."""
    posts = Posts()
    engine = Engine(torch.device("cpu"), 1, posts.post, lambda: None)
    engine.start()
    engine.forget(1)
    engine.order(orders.Build(orders.Assignment(1, 1, 1, 0, 4, 0), SPEC, slices(SPEC)[0], LAYOUT, None, None))
    posts.until(orders.TaskReport)
    yield engine, posts
    engine.order(None)
    engine.join()


def ids_of(step: int) -> list[Message]:
    feed = Feed(SPEC, corpus_of(SPEC))
    return [Message("forward", f.step, f.microbatch, 0, f.ids, b"") for f in feed.step(step)]


def test_what_comes_before_its_step_is_granted_waits(first_stage):
    engine, posts = first_stage
    for message in [*ids_of(1), *ids_of(2)]:
        engine.deliver(message)
    assert posts.is_quiet(), "no step is granted"
    assert not engine.starving, "so nothing is waited for"
    engine.order(orders.Run(2, "forward", 1, 2, 0))
    sent = [posts.until(Message)[-1] for _ in range(2)]
    assert [(m.step, m.microbatch) for m in sent] == [(1, 0), (1, 1)]
    assert posts.is_quiet(), "the ids of step 2 are here, and step 1 waits for its gradients"
    assert engine.starving


@pytest.mark.parametrize("stray", [(2, 0), (1, 1)])
def test_what_comes_out_of_order_is_said_and_not_waited_on_for_ever(first_stage, stray):
    """Behind it, what the step needs would never be reached."""
    engine, posts = first_stage
    engine.deliver(next(m for m in ids_of(stray[0]) if m.microbatch == stray[1]))
    for message in ids_of(1):
        engine.deliver(message)
    engine.order(orders.Run(2, "forward", 1, 2, 0))
    failure = posts.until(orders.Failure)[-1]
    assert isinstance(failure.error, OutOfOrder)
    assert (failure.leg, failure.error.got, failure.error.expected) == ("forward", stray, (1, 0))


def test_what_came_for_an_old_generation_is_void(first_stage):
    engine, posts = first_stage
    for message in ids_of(2):
        engine.deliver(message)
    engine.forget(2)
    engine.order(orders.Reuse(orders.Assignment(2, 2, 1, 0, 4, 0), None))
    posts.until(orders.TaskReport)
    for message in ids_of(1):
        engine.deliver(message)
    engine.order(orders.Run(3, "forward", 1, 2, 0))
    assert posts.until(Message)[-1].step == 1


def test_a_stage_that_was_built_ahead_is_not_built_again_and_any_other_is(first_stage):
    engine, posts = first_stage

    def build(generation: int, index: int = 0) -> StageWork:
        part, assignment = slices(SPEC)[index], orders.Assignment(7, generation, 2, 0, 4, 0)
        layout = [(torch.device("cpu"), part.layers)]
        engine.order(orders.Build(assignment, SPEC, part, layout, None, None))
        assert posts.until(orders.TaskReport)[-1].task == 7
        assert engine._work is not None
        return engine._work

    in_a_generation = build(2)
    assert build(3) is not in_a_generation, "it may have been trained since"
    engine.order(orders.Drop())
    ahead = build(-1)
    assert build(4) is ahead
    assert build(5) is not ahead
    ahead = build(-2)
    assert build(6, 1) is not ahead


ALONE = make_spec(stages=1)


@pytest.fixture
def whole_model() -> Iterator[tuple[Engine, Posts]]:
    """All layers in generation 1, with the gradients of step 1, whose outcome nobody has said."""
    posts, part = Posts(), slices(ALONE)[0]
    engine = Engine(torch.device("cpu"), 1, posts.post, lambda: None)
    engine.start()
    engine.forget(1)
    basis, layout = initial_basis(ALONE.model.width, ALONE.subspace.k, 0), [(torch.device("cpu"), part.layers)]
    engine.order(orders.Build(orders.Assignment(1, 1, 1, 0, 4, 0), ALONE, part, layout, basis, None))
    engine.order(orders.Run(2, "forward", 1, 2, 0))
    for fed in Feed(ALONE, corpus_of(ALONE)).step(1):
        engine.deliver(Message("forward", 1, fed.microbatch, 0, fed.ids, b""))
    assert [posts.until(orders.TaskReport)[-1].task for _ in range(2)] == [1, 2]
    yield engine, posts
    engine.order(None)
    engine.join()


DECIDED = orders.Decide(1, True, 1e-3, 1.0)
OTHER_BASIS = orders.HoldBasis(initial_basis(ALONE.model.width, ALONE.subspace.k, 1))  # of version 0


@pytest.mark.parametrize(
    ("first", "wrong"),
    [
        ([], orders.Decide(2, True, 1e-3, 1.0)),
        ([], orders.Decide(0, True, 1e-3, 1.0)),
        ([DECIDED], DECIDED),
        ([DECIDED], orders.Decide(2, True, 1e-3, 1.0)),  # whose gradients are not here
        ([], orders.Run(3, "forward", 2, 2, 0)),
        ([DECIDED], orders.Run(3, "forward", 1, 2, 0)),
        ([DECIDED], orders.Run(3, "forward", 3, 2, 0)),
        ([DECIDED], orders.Run(3, "forward", 2, 2, 1)),  # with a basis that never came
        ([DECIDED, OTHER_BASIS], orders.Run(3, "forward", 2, 2, 1)),  # … or another
        ([DECIDED], orders.Reuse(orders.Assignment(3, 2, 1, 2, 4, 0), None)),
        ([orders.Drop()], DECIDED),
        ([orders.Drop()], orders.CopyState()),
    ],
)
def test_an_order_that_does_not_follow_is_said_and_changes_nothing(whole_model, first, wrong):
    engine, posts = whole_model
    for order in [*first, orders.Describe()]:
        engine.order(order)
    described = posts.until(orders.Described)[-1]
    before = {} if engine._work is None else parameter_hashes(engine._work.stage)
    engine.order(wrong)
    assert isinstance(posts.until(orders.Failure)[-1].error, WrongOrder)
    engine.order(orders.Describe())
    assert posts.until(orders.Described)[-1] == described
    assert ({} if engine._work is None else parameter_hashes(engine._work.stage)) == before
    if not first:
        engine.order(DECIDED)
        engine.order(orders.HashWeights(9))
        assert posts.until(orders.TaskReport)[-1].parameters != before, "what was prepared is still there"


def test_it_can_be_seen_from_outside_whether_it_is_still_at_the_same_work(first_stage, monkeypatch):
    engine, _ = first_stage
    at_it, may_go = threading.Semaphore(0), threading.Semaphore(0)

    def slowly(self: StageWork, work: Any, message: Message) -> list[Message]:
        at_it.release()
        may_go.acquire()
        work.entered += 1
        return []

    monkeypatch.setattr(StageWork, "forward", slowly)
    for message in ids_of(1):
        engine.deliver(message)
    engine.order(orders.Run(2, "forward", 1, 2, 0))
    seen = []
    for _ in range(2):  # microbatches
        at_it.acquire(timeout=PATIENCE)
        seen.append(engine.busy_with)
        time.sleep(0.1)
        seen.append(engine.busy_with)
        may_go.release()
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert all(seen)
    wait_for(lambda: engine.busy_with == 0, "it waits for gradients, and is busy all the same")


def test_a_device_that_is_waited_for_is_seen_while_the_thread_itself_has_nothing_to_do(first_stage):
    engine, posts = first_stage
    wait_for(lambda: engine.busy_with == 0, "it has nothing to do, and is busy")
    at_it, may_go = threading.Semaphore(0), threading.Semaphore(0)

    def hang() -> str:
        at_it.release()
        may_go.acquire()
        return "fetched"

    seen = []
    for _ in range(2):  # messages
        fetching = threading.Thread(target=engine._outbox.put, args=(1, Pending("forward", hang)))
        fetching.start()
        at_it.acquire(timeout=PATIENCE)
        seen += [engine.busy_with, engine.busy_with]
        may_go.release()
        fetching.join()
        assert engine.busy_with == 0
        assert posts.get() == (1, "fetched")
    assert seen[0] == seen[1] != seen[2] == seen[3]
    engine._doing = 1  # the first thing that the thread did
    assert engine.busy_with not in (0, *seen), "another piece of work has the same number"


def test_behind_a_message_that_could_not_be_fetched_no_other_of_its_generation_goes_out():
    def bad() -> Message:
        error = BadMessage("not finite", "not_finite")
        error.leg = "backward"
        raise error

    posts = Posts()
    outbox = Outbox(posts.post, torch.device("cpu"))
    report, copied = orders.Taken("forward"), orders.Copied(1, 1, {})
    first, second = ids_of(1)
    outbox.put(3, Pending("forward", lambda: first))
    outbox.put(3, Pending("forward", bad))
    outbox.put(3, Pending("forward", lambda: second))
    outbox.put(3, Pending("backward", bad))
    outbox.put(3, report)
    outbox.put(3, Pending(None, lambda: copied))
    outbox.put(4, Pending("forward", lambda: second))
    got = [posts.get_nowait() for _ in range(posts.qsize())]
    [failure] = [item for _, item in got if isinstance(item, orders.Failure)]
    assert failure.leg == "backward"
    assert got == [(3, first), (3, failure), (3, report), (3, copied), (4, second)]


@pytest.mark.parametrize("where", ["warm_up", "forward", "decide"])
def test_a_device_that_runs_out_of_memory_is_said_wherever_it_happens(where, monkeypatch):
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Stage if where == "warm_up" else StageWork, where, no_room)
    posts = Posts()
    engine = Engine(torch.device("cpu"), 1, posts.post, lambda: None)
    engine.start()
    engine.forget(1)
    engine.order(orders.Build(orders.Assignment(1, 1, 1, 0, 4, 0), SPEC, slices(SPEC)[0], LAYOUT, None, None))
    if where == "forward":
        engine.order(orders.Run(2, "forward", 1, 2, 0))
        engine.deliver(ids_of(1)[0])
    elif where == "decide":
        engine.order(orders.Decide(1, True, 1e-3, 1.0))
    assert is_out_of_memory(posts.until(orders.Failure)[-1].error)
    engine.order(None)
    engine.join()


def test_memory_is_measured_afresh_once_the_stage_before_is_gone():
    alive: list[int] = []
    built: list[weakref.ref[Any]] = []
    posts = Posts()
    engine = Engine(
        torch.device("cpu"), 1, posts.post, lambda: alive.append(sum(stage() is not None for stage in built))
    )
    engine.start()
    for generation in (1, 2):
        engine.forget(generation)
        assignment = orders.Assignment(1, generation, 1, 0, 4, 0)
        engine.order(orders.Build(assignment, SPEC, slices(SPEC)[0], LAYOUT, None, None))
        posts.until(orders.TaskReport)
        assert engine._work is not None
        built.append(weakref.ref(engine._work.stage))
    engine.order(None)
    engine.join()
    assert alive == [0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_is_told_of_once():
    posts = Posts()
    engine = Engine(torch.device("cpu"), 1, posts.post, lambda: None)
    assert [engine._memory.empty(size).shape for size in (3, 4)] == [(3,), (4,)]
    assert [type(item) for _, item in posts.queue] == [notices.NotPinned]
