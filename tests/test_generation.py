"""One generation of a peer: its links, the credit that they give, and what keeps one from opening."""

from __future__ import annotations

import asyncio

import torch
from conftest import make_spec
from waiting import until

from protomodels_cli.cost.memory import in_flight_limit, least_in_flight
from protomodels_cli.wire import troubles
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.relay import NOBODY
from protomodels_cli.wire.tls import new_authority, peer_name
from protomodels_cli.worker import generation as generations
from protomodels_cli.worker import notices
from protomodels_cli.worker.engine import Engine
from protomodels_cli.worker.generation import Generation
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.paths import Network

IDENTITY = new_authority().issue_with_key(peer_name("p"))


def test_credit_goes_out_before_a_neighbour_that_holds_the_least_must_wait_for_it():
    """In an evaluation nothing goes back that could carry it; a peer with little memory holds less than a window."""
    spec = make_spec(stages=2, batch={"size": 32, "microbatches": 32})
    assigned = pb.Assignment(generation=3, stage=1, layers_per_stage=[2, 2])
    assigned.previous.add(way=pb.Route.LISTEN, peer="q")
    taken = 0

    async def story() -> None:
        nonlocal taken
        network = Network(lambda: IDENTITY, Listener(IDENTITY), lambda: ("127.0.0.1", 1), None)
        engine = Engine(torch.device("cpu"), 1, lambda *_: None, lambda: None)
        generation = Generation(assigned, spec, network, engine, print, print)
        link = generation._links["previous"]
        link.mended.set()
        while not link.bytes_sent["credit"]:
            generation.take("evaluation")
            taken += 1
        await generation.end()

    asyncio.run(story())
    assert taken <= least_in_flight(spec, 1) < in_flight_limit(spec, 1) // 2


def test_what_keeps_a_relayed_link_from_opening_is_said_once_and_told_to_the_coordinator(monkeypatch, unused_port: int):
    monkeypatch.setattr(generations, "GRACE", 0.05)
    spec = make_spec(stages=2, limits={"link_seconds": 2.0})
    assigned = pb.Assignment(generation=3, stage=1, layers_per_stage=[2, 2])
    assigned.previous.add(way=pb.Route.LISTEN, unlikely=True, peer="q", ticket="ticket")
    told: list[notices.Notice] = []
    reported: list[troubles.Trouble] = []

    async def nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(NOBODY)
        await writer.drain()
        writer.close()

    async def story() -> None:
        network = Network(lambda: IDENTITY, Listener(IDENTITY), lambda: ("127.0.0.1", unused_port), None)
        engine = Engine(torch.device("cpu"), 1, lambda *_: None, lambda: None)
        generation = Generation(assigned, spec, network, engine, reported.append, told.append)
        connecting = asyncio.create_task(generation.connect())
        await until(lambda: reported)
        assert len(told) == 1
        relay = await asyncio.start_server(nobody, "127.0.0.1", unused_port)
        await until(lambda: len(told) == 2)
        connecting.cancel()
        await generation.end()
        relay.close()

    asyncio.run(story())
    failed, works = told
    assert isinstance(failed, notices.RelayFailed)
    assert failed.stage == 0
    assert str(unused_port) in failed.detail
    assert works == notices.RelayWorks(0)
    assert reported == [troubles.LinkNotOpened(0, failed.detail)]
