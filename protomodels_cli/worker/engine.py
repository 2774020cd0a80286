"""The compute thread: takes what the event loop hands it, computes, hands back what came of it.

One thread owns the stage. The loop never touches a weight, and this thread never touches a socket: they meet at an
inbox here and at `post`, which runs in the loop. It must not know protobuf, peers or the coordinator.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

import torch

from protomodels_cli.model.basis import Basis
from protomodels_cli.model.state import parameter_hashes
from protomodels_cli.protocol.messages import BadMessage, Leg, OutOfOrder
from protomodels_cli.protocol.schedule import View, next_work
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.usage import Usage
from protomodels_cli.worker.notices import NotCompiled, NotPinned
from protomodels_cli.worker.orders import (
    Assignment,
    Audit,
    Build,
    Copied,
    CopyState,
    Decide,
    Describe,
    Described,
    Drop,
    Failure,
    HashWeights,
    HoldBasis,
    Order,
    PartUnusable,
    ReportSync,
    Reuse,
    Run,
    SubspaceReport,
    Taken,
    TaskReport,
    WrongOrder,
)
from protomodels_cli.worker.pinning import HostMemory, memory_for
from protomodels_cli.worker.snapshots.loading import UnusablePart, load_part
from protomodels_cli.worker.stage_work import Pass, Pending, StageWork


class Outbox:
    """Posts what the compute thread hands it, in order. Where things are still on their way from the device, a thread
    of its own waits for them."""

    def __init__(self, post: Callable[[int, Any], None], device: torch.device):
        self._post_with, self._device = post, device
        self._failed = 0  # the last generation in which a wait failed
        self._waits = 0
        self.waiting_for = 0  # the number of what it waits for, below zero: above are the compute thread's; 0: nothing
        self._queue: queue.SimpleQueue[tuple[int, Any] | None] | None = None
        if device.type == "cuda":
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queue,), name="outbox", daemon=True).start()

    def put(self, generation: int, item: Any) -> None:
        if self._queue is None:
            self._post(generation, item)
        else:
            self._queue.put((generation, item))

    def end(self) -> None:
        if self._queue is not None:
            self._queue.put(None)

    def _run(self, waiting: queue.SimpleQueue[tuple[int, Any] | None]) -> None:
        torch.cuda.set_device(self._device)  # a new thread's is the first card, whichever its parent's is
        while (entry := waiting.get()) is not None:
            self._post(*entry)

    def _post(self, generation: int, item: Any) -> None:
        if isinstance(item, Pending):
            if item.leg is not None and generation == self._failed:
                return  # a message behind one that never went: the next stage would blame us for the gap
            try:
                item = self._wait_for(item)
            except Exception as error:  # as in the compute thread, which is further on already
                self._failed = generation
                item = Failure(error, getattr(error, "leg", None))
        self._post_with(generation, item)

    def _wait_for(self, pending: Pending) -> Any:
        self._waits += 1
        self.waiting_for = -self._waits
        try:
            return pending.wait()
        finally:
            self.waiting_for = 0


class Engine(threading.Thread):
    """`post` is given what comes back and messages to send, in order, each with its generation; it returns at once."""

    def __init__(
        self,
        device: torch.device,
        threads: int,
        post: Callable[[int, Any], None],
        reset_peak: Callable[[], None],
    ):
        """`device`: the one that messages come to and leave from. `reset_peak` begins to measure memory afresh."""
        super().__init__(name="compute", daemon=True)
        self._device, self._threads, self._reset_peak = device, threads, reset_peak
        self._outbox = Outbox(post, device)
        self._memory = HostMemory(lambda why: self._post(NotPinned(why)))
        self.allocate = memory_for(device, self._memory)  # for messages that are coming in
        self._generation = self._wanted = 0  # of the stage here, and of what the loop asks for
        self._lineage = 0
        self._news = threading.Condition()
        self._orders: deque[Order | None] = deque()  # None: end
        self._arrived: dict[Leg, deque[Message]] = {"forward": deque(), "backward": deque(), "evaluation": deque()}
        self._on_the_way = 0  # messages that the next stage has not taken
        self._unsent = 0  # messages that have not left this process
        self._work: StageWork | None = None
        self._run: Run | None = None  # with its pass, while one is under way
        self._pass: Pass | None = None
        self._held: Basis | None = None
        self._ahead: tuple[Any, ...] | None = None  # what the stage here was built from, ahead of an assignment
        self._limit = 1
        self._usage = Usage()
        self._idle = {True: 0.0, False: 0.0}  # seconds without work, by whether own messages were leaving
        self._todos = 0
        self._doing = 0  # the number of what the thread is doing; 0: it waits

    # From the event loop

    @property
    def busy_with(self) -> int:
        """The number of the piece of work that is under way, or waited for on its way out; 0: none. The thread only
        queues work on a CUDA device: one that hangs may leave it without anything to do."""
        return self._doing or self._outbox.waiting_for

    @property
    def starving(self) -> bool:
        """Whether a step is under way and nothing is here to be computed next, after the work at hand: what comes over
        the line now is waited for."""
        work = self._pass
        if work is None:
            return False
        takes_more = work.entered < work.microbatches and max(len(work.flights), self._on_the_way) < self._limit
        return not self._arrived["backward"] and not (takes_more and self._arrived[work.leg])

    def order(self, order: Order | None) -> None:
        with self._news:
            self._orders.append(order)
            self._news.notify()

    def deliver(self, message: Message) -> None:
        with self._news:
            self._arrived[message.leg].append(message)
            self._news.notify()

    def has_sent(self) -> None:
        """Note that a message has left this process."""
        with self._news:
            self._unsent -= 1
            if self._unsent == 0:
                self._news.notify()  # from here on, idle is waiting

    def next_has_taken(self, messages: int) -> None:
        with self._news:
            self._on_the_way -= messages
            self._news.notify()

    def forget(self, generation: int) -> None:
        """A new generation: whatever came for the old one is void, and so is what the thread is still doing for it."""
        with self._news:
            self._wanted = generation
            self._orders.clear()
            for queue in self._arrived.values():
                queue.clear()
            self._on_the_way = self._unsent = 0

    # In the thread

    def run(self) -> None:
        torch.set_num_threads(self._threads)  # here: on some builds it is a property of the thread
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        going = True
        while going:
            todo: Order | Message | None = None
            try:
                self._doing = 0
                if (todo := self._next()) is None:
                    going = False
                else:
                    self._todos += 1
                    self._doing = self._todos
                    self._take(todo)
            except Exception as error:  # the session says what becomes of it; a new generation starts afresh
                self._run = self._pass = None
                self._post(Failure(error, getattr(error, "leg", None) or getattr(todo, "leg", None)))
        self._outbox.end()

    def _take(self, todo: Order | Message) -> None:
        if self._work is not None:
            self._work.clock.turn("compute")
        if isinstance(todo, Message):
            self._compute(todo)
        else:
            self._obey(todo)
        if self._work is not None:
            self._work.clock.turn("idle")
            self._work.transfers.pace()

    def _post(self, item: Any) -> None:
        self._outbox.put(self._generation, item)

    def _next(self) -> Order | Message | None:
        """The next thing to do. Time spent here is the wire's while own messages are leaving, else it is waiting."""
        with self._news:
            while True:
                if self._orders:
                    return self._orders.popleft()
                if (message := self._next_message()) is not None:
                    return message
                started, leaving = time.perf_counter(), self._unsent > 0
                self._news.wait()
                waited = time.perf_counter() - started
                self._idle[leaving] += waited

    def _next_message(self) -> Message | None:
        work = self._pass
        if work is None:
            return None
        inputs, gradients = self._arrived[work.leg], self._arrived["backward"]
        view = View(
            gradient=work.leg == "forward" and self._is_next(gradients, work.step, work.finished),
            input=work.entered < work.microbatches and self._is_next(inputs, work.step, work.entered),
            in_flight=len(work.flights),
            on_the_way=self._on_the_way,
            limit=self._limit,
        )
        chosen = next_work(view)
        if chosen is None:
            return None
        return gradients.popleft() if chosen == "backward" else inputs.popleft()

    def _is_next(self, queue: deque[Message], step: int, microbatch: int) -> bool:
        """Whether this message has arrived. Raises OutOfOrder where another is first: a neighbour's fault, as messages
        of later steps wait behind those of earlier ones."""
        if not queue:
            return False
        head = queue[0]
        if (head.step, head.microbatch) != (step, microbatch):
            raise OutOfOrder(head.leg, (head.step, head.microbatch), (step, microbatch))
        return True

    def _compute(self, message: Message) -> None:
        assert self._work is not None
        assert self._run is not None
        assert self._pass is not None
        run, work = self._run, self._pass
        self._post(Taken(message.leg))
        if message.payload != b"" and message.basis_version != run.basis_version:
            raise BadMessage(
                f"computed with basis {message.basis_version} where step {run.step} has {run.basis_version}"
            )
        for outgoing in (self._work.backward if message.leg == "backward" else self._work.forward)(work, message):
            with self._news:
                if self._generation == self._wanted:
                    self._unsent += 1
                    self._on_the_way += outgoing.leg != "backward"
            self._post(outgoing)
        self._usage.most_in_flight = max(self._usage.most_in_flight, len(work.flights))
        if work.complete:
            loss_sum = self._work.loss_sum()
            norms = self._work.prepare(self._generation) if run.leg == "forward" else {}
            if run.leg == "forward":
                sizes = self._work.sizes
                self._usage.grown_forward, self._usage.grown_backward = sizes["forward"].grown, sizes["backward"].grown
            self._run = self._pass = None
            step = run.step if run.leg == "forward" else 0
            self._report(run.task, norms=norms, loss_sum=loss_sum, tokens=work.tokens, step=step)

    def _obey(self, order: Order) -> None:
        match order:
            case Drop():
                self._run = self._pass = self._work = self._held = self._ahead = None
                return
            case Audit(job, result):
                try:
                    result.set_result(job() if self._work is None else [])
                except Exception as error:  # which concerns nothing here
                    result.set_exception(error)
                return
            case Describe():
                work = self._work
                self._post(Described(None if work is None else (self._lineage, work.step, work.prepared)))
                return
            case Build(assignment, spec, layers, layout, basis, path):
                self._generation = assignment.generation  # also of the failure to build it
                ahead, self._ahead = self._ahead, None
                if ahead == order.source:
                    assert self._work is not None
                    self._begin(assignment, self._work)
                    return
                self._run = self._pass = self._work = self._held = None  # two would not fit
                self._reset_peak()
                try:
                    saved = None if path is None else load_part(path, spec, layers.layers, assignment.step)
                except UnusablePart as error:
                    self._post(PartUnusable(str(error)))
                    return
                self._work = StageWork(
                    spec, layers, basis, layout, saved, assignment.step, assignment.recompute, self._memory
                )
                if self._work.not_compiled is not None:
                    self._post(NotCompiled(self._work.not_compiled))
                self._ahead = order.source if assignment.generation < 0 else None
                self._begin(assignment, self._work)
                return
        work = self._work
        if work is None:
            raise WrongOrder(f"{type(order).__name__} where no stage is in memory")
        match order:
            case Reuse(assignment, decision):
                is_owed = decision is not None and work.prepared and decision.step == work.step + 1
                if (self._lineage, work.step + bool(is_owed)) != (assignment.lineage, assignment.step):
                    raise WrongOrder(
                        f"asked to reuse step {assignment.step} of lineage {assignment.lineage}, which is not in memory"
                    )
                self._generation = assignment.generation
                self._run = self._pass = None
                if decision is not None and is_owed:
                    self._decide(decision, work)  # what it says of the subspace then is asked for with the assignment
                work.abandon()
                self._begin(assignment, work)
            case Decide():
                if self._decide(order, work):
                    self._report_subspace(work)
            case Run():
                if order.leg == "forward" and order.step != work.step + 1:
                    raise WrongOrder(f"step {order.step} where this stage has decided step {work.step}")
                if order.basis_version != work.basis_version:
                    held = self._held
                    if held is None or held.version != order.basis_version:
                        has = "no other" if held is None else f"basis {held.version} besides"
                        raise WrongOrder(
                            f"step {order.step} with basis {order.basis_version}, where this stage computes with basis "
                            f"{work.basis_version} and holds {has}"
                        )
                    work.switch_basis(held)
                    self._held = None
                self._run, self._pass = order, work.begin(order.leg, order.step, order.microbatches)
            case ReportSync(task):
                self._report(task, sync=work.stage.sync())
            case CopyState():
                lineage, step, wait = self._lineage, work.step, work.copy_state()
                self._post(Pending(None, lambda: Copied(lineage, step, wait())))
            case HashWeights(task):
                self._report(task, parameters=parameter_hashes(work.stage))
            case HoldBasis(basis):
                self._held = basis
            case _:
                assert_never(order)

    def _begin(self, assignment: Assignment, work: StageWork) -> None:
        self._lineage, self._limit = assignment.lineage, assignment.limit
        work.stage.recompute = assignment.recompute  # of a stage that is reused, the share of memory may be another
        if assignment.owed and work.last_report is not None and work.last_report[0] == assignment.owed:
            self._report_subspace(work)
        self._report(assignment.task, sync=work.stage.sync())

    def _decide(self, decision: Decide, work: StageWork) -> bool:
        """Take or skip the step. Returns whether it ends a gathering of gradients, which is then reported."""
        work.decide(decision.step, decision.apply, decision.lr, decision.clip)
        return work.report_subspace()

    def _report_subspace(self, work: StageWork) -> None:
        assert work.last_report is not None
        self._post(SubspaceReport(*work.last_report))

    def _report(self, task: int, **found: Any) -> None:
        assert self._work is not None
        spent, idle = self._work.clock.read(), sum(self._idle.values())
        leaving = self._idle[True] / idle if idle else 0.0
        usage, self._usage = self._usage, Usage()
        usage.compute_s = spent["compute"]
        usage.wire_s, usage.wait_s = spent["wire"] + leaving * spent["idle"], (1 - leaving) * spent["idle"]
        self._idle = {True: 0.0, False: 0.0}
        self._post(TaskReport(task, usage, **found))
