"""The prefill role: takes what it can hold, streams what is asked for, and lets everything go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.spec import bytes_of_page, held_blocks, needed_blocks
from prfaas.engine.submission import EngineLoad
from prfaas.errors import BadRequest, IncompatiblePeer, Overloaded
from prfaas.server.places import places_to_send
from prfaas.server.prefill_job import tokens_ahead
from prfaas.server.prefill_service import MAX_CANCELLED
from prfaas.transport.address import PeerAddress
from prfaas.transport.client import PeerClient
from prfaas.transport.messages import TransferAccepted, TransferRequest, TransferTotals
from prfaas.transport.wire import Frame, FrameHeader, FrameType, decode_progress
from tests.server.fleet import (
    CONTEXT_TOKENS,
    IDENTITY,
    OPTIONS,
    Fleet,
    fleet,
    prompt,
    request,
    until,
)
from tests.server.scripted_engine import (
    BLOCK_TOKENS,
    DENSE,
    HYBRID,
    STATES,
    VOCAB_SIZE,
    page_bytes,
)
from tests.transport.samples import CAPABILITY

pytestmark = pytest.mark.usefixtures("no_leaks")
layouts = pytest.mark.parametrize(
    "layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"]
)


def asked(num_tokens: int = 100, *, number: int = 0, **changes: object) -> TransferRequest:
    made = TransferRequest(
        transfer_id=f"{number:032d}",
        identity=IDENTITY,
        accept_approximate=False,
        request=request(num_tokens, variant=number),
        have_tokens=0,
        capability=CAPABILITY,
        credit_bytes=1 << 40,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def client_of(nodes: Fleet) -> AsyncIterator[PeerClient]:
    client = PeerClient(PeerAddress("127.0.0.1", nodes.prefill.port), OPTIONS)
    try:
        yield client
    finally:
        await client.close()


class Received:
    """Pages by place, and the other frames in order."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, int, int], bytearray] = {}
        self.frames: list[tuple[FrameType, bytes]] = []

    def resolve(self, header: FrameHeader) -> memoryview:
        place = (header.group, header.index, header.block)
        assert place not in self.pages, f"{place} came twice"
        self.pages[place] = bytearray(header.length)
        return memoryview(self.pages[place])

    def accepted(self, accepted: TransferAccepted) -> None:
        self.hit_tokens = accepted.hit_tokens

    def take(self, frame: Frame) -> None:
        self.frames.append((frame.header.type, frame.payload))

    def ended(self, totals: TransferTotals) -> None:
        self.frames.append((FrameType.END, b""))

    async def pull(self, client: PeerClient, request: TransferRequest) -> None:
        async with client.pull(request, self) as pulling:
            while not pulling.is_finished:
                await pulling.step()
            assert pulling.acknowledge()


@layouts
@pytest.mark.parametrize("have_tokens", [0, 40, 96])
async def test_exactly_the_missing_pages_are_sent_once_each_with_the_right_bytes(
    layout, have_tokens
):
    async with fleet(layout=layout) as nodes, client_of(nodes) as client:
        # Warm the node's own cache with half of the prompt: its hit must be sent too.
        warm = asked(50, number=1)
        await Received().pull(client, warm)
        one = asked(100, number=2, have_tokens=have_tokens)
        tokens = prompt(100, 1)
        one = replace(one, request=replace(one.request, prompt_tokens=tokens))
        received = Received()
        await received.pull(client, one)
        assert received.hit_tokens == 50 // BLOCK_TOKENS * BLOCK_TOKENS
        places = places_to_send(layout, 100, have_tokens)
        assert set(received.pages) == {(p.group, p.index, p.block) for p in places}
        for (group, index, block), data in received.pages.items():
            assert data == page_bytes(layout, group, index, block, tokens)
        kinds = [kind for kind, _ in received.frames]
        assert kinds.count(FrameType.FIRST_TOKENS) == kinds.count(FrameType.END) == 1
        assert FrameType.LOGITS not in kinds


@given(
    num_tokens=st.integers(1, 200),
    have_blocks=st.integers(0, 24),
    layout=st.sampled_from([DENSE, HYBRID, STATES]),
)
def test_what_is_held_and_what_is_sent_make_up_what_is_needed(num_tokens, have_blocks, layout):
    have_tokens = min(have_blocks, (num_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    sent = places_to_send(layout, num_tokens, have_tokens)
    assert len(set(sent)) == len(sent)
    for group, spec in enumerate(layout.groups):
        held = set(held_blocks(spec, have_tokens, BLOCK_TOKENS))
        needed = set(needed_blocks(spec, num_tokens, BLOCK_TOKENS))
        for index in range(spec.pages_per_block):
            blocks = {p.block for p in sent if (p.group, p.index) == (group, index)}
            assert blocks == needed - held
    total = sum(
        bytes_of_page(layout.groups[p.group], p.index, p.num_tokens, BLOCK_TOKENS) for p in sent
    )
    assert total == layout.bytes_needed(num_tokens, have_tokens)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"identity": replace(IDENTITY, kv_dtype="int4")}, IncompatiblePeer, "'int4' there"),
        ({"have_tokens": 3}, BadRequest, "have_tokens = 3"),
        ({"credit_bytes": 99}, BadRequest, "a credit of 99 bytes"),
        (
            {"credit_bytes": HYBRID.bytes_needed(100), "snapshot_tokens": 2 * BLOCK_TOKENS},
            BadRequest,
            f"a credit of {HYBRID.bytes_needed(100)} bytes",
        ),
        ({"request": request(CONTEXT_TOKENS)}, BadRequest, f"{CONTEXT_TOKENS} prompt tokens"),
        ({"request": request(prompt_tokens=(1, VOCAB_SIZE))}, BadRequest, f"id {VOCAB_SIZE}"),
    ],
)
async def test_what_it_cannot_do_is_refused_before_any_work(changes, error, words):
    async with fleet() as nodes:
        with pytest.raises(error, match=words):
            await nodes.prefill.node.service.open(asked(**changes))
        assert nodes.prefill_cache.counts().lookups.num_queries == 0


async def test_a_transfer_is_due_when_its_asker_would_have_computed_it():
    async with fleet() as nodes:
        started_s = asyncio.get_running_loop().time()
        for number, haste_s in enumerate((None, 100.0)):
            one = asked(number=number, deadline_s=haste_s)
            await nodes.prefill.node.service.open(one)
            transfer = nodes.prefill.node.service.transfer(one.transfer_id)
            assert transfer is not None
            if haste_s is None:
                assert transfer.deadline_s is None
            else:
                assert transfer.deadline_s is not None
                assert transfer.deadline_s >= started_s + haste_s
            assert nodes.prefill.node.service.cancel(one.transfer_id)


async def test_a_second_transfer_of_one_id_is_refused_and_the_first_goes_on():
    async with fleet() as nodes, client_of(nodes) as client:
        received = Received()
        async with client.pull(asked(), received) as pulling:
            with pytest.raises(BadRequest, match="exists"):
                await nodes.prefill.node.service.open(asked())
            while not pulling.is_finished:
                await pulling.step()
        assert received.frames[-1][0] is FrameType.END


async def test_pages_for_all_of_it_are_reserved_before_it_begins():
    async with fleet(prefill_pages=2 * HYBRID.pages_needed(100)) as nodes:
        nodes.prefill_engine.gate.clear()
        await nodes.prefill.node.service.open(asked(number=1))
        assert nodes.prefill_cache.counts().num_transfer == HYBRID.pages_needed(100)
        await nodes.prefill.node.service.open(asked(number=2))
        with pytest.raises(Overloaded, match="no free pages"):
            await nodes.prefill.node.service.open(asked(number=3))
        assert nodes.prefill.node.load().num_transfers == 2
        for number in (1, 2):
            assert nodes.prefill.node.service.cancel(f"{number:032d}")
        nodes.prefill_engine.gate.set()


async def test_a_transfer_that_nobody_fetches_loses_its_lease_and_its_pages():
    async with fleet(lease_s=0.2) as nodes:
        await nodes.prefill.node.service.open(asked())
        await nodes.at_rest()
        assert nodes.prefill_metrics.outcomes == [("sent", "expired")]


async def test_pages_stay_until_the_receiver_says_that_they_are_verified():
    async with fleet(layout=DENSE, lease_s=5.0) as nodes, client_of(nodes) as client:
        received, node = Received(), nodes.prefill.node
        async with client.pull(asked(), received) as pulling:
            while not pulling.is_finished:
                await pulling.step()
            await until(lambda: nodes.prefill_engine.load().num_running == 0)
            assert nodes.prefill_cache.counts().num_tables == 1
            assert node.load().num_transfers == 1
            assert pulling.acknowledge()
        await nodes.at_rest()
        assert nodes.prefill_metrics.outcomes == [("sent", "completed")]


async def test_a_transfer_cancelled_while_its_prompt_is_looked_up_never_starts(monkeypatch):
    monkeypatch.setattr("prfaas.server.key_thread.INLINE_TOKENS", 1)
    async with fleet() as nodes, asyncio.TaskGroup() as tasks:
        service = nodes.prefill.node.service
        opening = tasks.create_task(_refused(service.open(asked())))
        await asyncio.sleep(0)
        assert service.cancel(asked().transfer_id)
        assert "cancelled" in await opening
        assert not service.cancel(asked().transfer_id)
        assert nodes.prefill_engine.load().step_count == 0


async def test_a_cancel_that_overtakes_its_transfer_keeps_it_from_starting():
    async with fleet() as nodes, client_of(nodes) as client:
        await client.cancel(asked().transfer_id)
        with pytest.raises(Overloaded, match="cancelled"):
            await client.open(asked())
        assert nodes.prefill.node.load().num_transfers == 0


async def test_cancels_of_unknown_transfers_are_remembered_within_bounds():
    async with fleet() as nodes, client_of(nodes) as client:
        for number in range(1, MAX_CANCELLED + 2):
            assert not nodes.prefill.node.service.cancel(f"{number:032d}")
        assert not nodes.prefill.node.service.cancel("x" * 100_000)
        await client.open(asked(number=1))
        assert nodes.prefill.node.service.cancel(asked(number=1).transfer_id)
        with pytest.raises(Overloaded, match="cancelled"):
            await client.open(asked(number=2))


async def _refused(opening) -> str:
    with pytest.raises(Overloaded) as caught:
        await opening
    return str(caught.value)


async def test_progress_is_told_only_while_the_engine_really_advances(monkeypatch):
    monkeypatch.setattr("prfaas.server.prefill_job.PROGRESS_INTERVAL_S", 0.02)
    async with fleet() as nodes, client_of(nodes) as client:
        engine = nodes.prefill_engine
        engine.gate.clear()
        received = Received()
        told: list[tuple[int, int]] = []
        async with client.pull(asked(200), received) as pulling:
            for _ in range(4):
                await pulling.step()
            assert not received.frames
            engine.prefill_step_s = 0.05
            engine.gate.set()
            while not pulling.is_finished:
                await pulling.step()
            assert pulling.acknowledge()
        for kind, payload in received.frames:
            if kind is FrameType.PROGRESS:
                told.append(decode_progress(payload))
        assert len(told) >= 3
        assert told == sorted(told)
        assert told[-1][0] <= 200


@pytest.mark.parametrize(
    ("waiting", "done", "ahead"),
    [(0, 0, 0), (200, 0, 0), (500, 0, 300), (450, 0, 250), (260, 60, 0), (150, 0, 0)],
)
def test_what_is_ahead_is_the_work_of_others_until_ones_own_has_begun(waiting, done, ahead):
    load = EngineLoad(
        num_running=1,
        num_waiting=1,
        num_waiting_tokens=waiting,
        kv_used_bytes=0,
        prefill_tokens_per_s=0.0,
        step_count=1,
    )
    assert tokens_ahead(load, num_tokens=200, tokens_done=done, hit_tokens=0) == ahead


async def test_a_draining_node_takes_nothing_new_and_finishes_what_it_has():
    async with fleet() as nodes, client_of(nodes) as client:
        received = Received()
        async with client.pull(asked(), received) as pulling:
            nodes.prefill.node.drain()
            assert nodes.prefill.node.service.status().is_ready is False
            with pytest.raises(Overloaded, match="draining"):
                await client.open(asked(number=2))
            while not pulling.is_finished:
                await pulling.step()
        assert received.frames[-1][0] is FrameType.END


async def test_closing_the_node_ends_its_transfers():
    async with fleet() as nodes:
        nodes.prefill_engine.prefill_step_s = 0.02
        for number in range(3):
            await nodes.prefill.node.service.open(asked(number=number))
        await nodes.prefill.close()
        await nodes.prefill.close()
        assert nodes.prefill_metrics.outcomes == [("sent", "stopped")] * 3
        assert nodes.prefill.node.is_ready == (False, "draining")


async def test_the_load_adds_up_to_all_pages():
    async with fleet(prefill_pages=500) as nodes:
        nodes.prefill_engine.gate.clear()
        await nodes.prefill.node.service.open(asked())
        load = nodes.prefill.node.load()
        assert sum(load.pages.values()) == 500
        assert load.pages["transfer"] == HYBRID.pages_needed(100)
        assert load.num_transfers == 1
        nodes.prefill.node.service.cancel(asked().transfer_id)
        nodes.prefill_engine.gate.set()
