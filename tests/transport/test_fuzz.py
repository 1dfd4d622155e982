"""Whatever a peer, an asker or a stranger sends: an expected error, bounded memory, and nobody else is hurt."""

import asyncio
import base64
import contextlib
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import IncompatiblePeer, Overloaded, ProtocolError, TransferError
from prfaas.transport.address import PeerAddress
from prfaas.transport.attach import Attach, encode_attach, parse_attach
from prfaas.transport.auth import Hello, encode_hello, parse_hello
from prfaas.transport.client import ATTACH_HEADER, FRAMES_PATH, STREAM_PATH, PeerClient
from prfaas.transport.codec import decode_page
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.dialing import connect, upgrade
from prfaas.transport.fields import dump
from prfaas.transport.handshake import parse_identity
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.measuring import (
    MeasureRequest,
    SenderReport,
    encode_measure_request,
    encode_sender_report,
    parse_measure_request,
    parse_sender_report,
)
from prfaas.transport.messages import (
    FirstTokens,
    PrefillTimes,
    TransferAccepted,
    TransferTotals,
    encode_accepted,
    encode_first_tokens,
    encode_totals,
    encode_transfer_request,
    parse_accepted,
    parse_first_tokens,
    parse_status,
    parse_totals,
    parse_transfer_request,
)
from prfaas.transport.ports import SocketPort
from prfaas.transport.sending import SWITCHING
from prfaas.transport.wire import (
    FROM_SENDER,
    Codec,
    FrameHeader,
    FrameType,
    encode_frame,
    encode_header,
    encode_run,
)
from prfaas.types import TokenEvent, TokenLogprobs
from tests.transport.channels import OPTIONS, Pages, channel, ended, finish, pull_all, warm
from tests.transport.samples import ASKED, CAPABILITY, IDENTITY, asked

NONCE = "0" * 64
ATTACH = Attach(
    transfer_id=ASKED.transfer_id, capability=CAPABILITY, stream=1, resumes=((0, 3), (2, 1))
)
MEASURE = MeasureRequest(
    transfer_id=ASKED.transfer_id, capability=CAPABILITY, num_bytes=4096, page_bytes=4096
)
REPORT = SenderReport(
    num_retransmits=1, bytes_sent=2, bytes_retrans=3, min_rtt_s=0.5, congestion="x", cpu_s=1.0
)
EVENT = TokenEvent(
    request_id="request",
    choice_index=0,
    token_id=3,
    logprobs=TokenLogprobs(logprob=-1.0, top=((3, -1.0),)),
    finish_reason=None,
)
TIMES = PrefillTimes(begun_s=0.5, computed_s=1.5, num_tokens=1, num_engine_tokens=2)
STATUS = {
    "identity": IDENTITY.to_json(),
    "is_ready": True,
    "reason": "",
    "num_waiting_tokens": 1,
    "prefill_tokens_per_s": 1.5,
    "egress_limit_bytes_per_s": 1e6,
}
PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "attach": (parse_attach, encode_attach(ATTACH)),
    "totals": (
        parse_totals,
        encode_totals(TransferTotals(num_pages=1, num_page_bytes=2, tokens_computed=3)),
    ),
    "request": (parse_transfer_request, encode_transfer_request(ASKED)),
    "accepted": (parse_accepted, encode_accepted(TransferAccepted(hit_tokens=16))),
    "status": (parse_status, dump(STATUS)),
    "first tokens": (
        lambda data: parse_first_tokens(data, ASKED.request),
        encode_first_tokens(FirstTokens(events=(EVENT,), times=TIMES)),
    ),
    "hello": (parse_hello, encode_hello(Hello(nonce=NONCE, epoch="e" * 64, identity=IDENTITY))),
    "measure": (parse_measure_request, encode_measure_request(MEASURE)),
    "report": (parse_sender_report, encode_sender_report(REPORT)),
    "identity": (lambda data: parse_identity(json.loads(data)), dump(IDENTITY.to_json())),
}

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 1 << 64, -1, "\ud800", "\x00", "A" * 32, 1e308, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=40),
    st.lists(st.integers(), max_size=4),
    st.lists(st.lists(st.integers(), max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def changed(value: Any, draw: random.Random, odd: Any) -> Any:
    """Return JSON with one value, anywhere in it, replaced or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {key: item for key, item in value.items() if key != name}
        return value | {name: changed(value[name], draw, odd)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        index = draw.randrange(len(value))
        return [*value[:index], changed(value[index], draw, odd), *value[index + 1 :]]
    return odd


@given(name=st.sampled_from(sorted(PARSERS)), seed=st.integers(0, 2**32), odd=odd_values)
def test_a_document_with_any_value_anywhere_is_read_or_refused(name, seed, odd):
    parse, valid = PARSERS[name]
    parse(valid)
    data = json.dumps(changed(json.loads(valid), random.Random(seed), odd)).encode()
    with contextlib.suppress(ProtocolError, IncompatiblePeer):
        parse(data)


@given(
    codec=st.sampled_from(sorted(Codec)),
    data=st.binary(max_size=300),
    num_bytes=st.sampled_from([4, 62, 64, 256]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "bytes"]),
)
def test_any_encoded_page_is_decoded_or_refused(codec, data, num_bytes, dtype):
    numbers = KvNumbers(dtype=dtype, row_items=[16]).of(0)
    try:
        page = decode_page(codec, data, num_bytes, numbers)
    except ProtocolError:
        return
    assert len(page) == num_bytes


def random_frames(draw: random.Random, num_frames: int) -> Iterator[bytes]:
    """Frames that are well formed, of any type, in any order, some cut short or damaged."""
    for _ in range(num_frames):
        kind = draw.choice(list(FrameType))
        if kind is FrameType.PAGE:
            payload = draw.randbytes(draw.choice([1, 31, 32, 33, 5000]))
            codec = draw.choice(list(Codec)) if draw.random() < 0.3 else Codec.RAW
            group, index = (draw.choice([0, 0, 1, 3, 60_000]) for _ in range(2))
            block = draw.choice([0, 1, 2, 3, 2**32 - 1])
            header = FrameHeader(kind, codec, group, index, block, draw.choice([1, 16, 2**31]))
            frame = encode_header(header, payload) + payload
        elif kind is FrameType.PAGES:
            frame = random_run(draw)
        else:
            frame = encode_frame(kind, random_payload(kind, draw))
        damage = draw.random()
        if damage < 0.05:
            frame = frame[: draw.randrange(len(frame))]
        elif damage < 0.1:
            at = draw.randrange(len(frame))
            frame = frame[:at] + bytes([frame[at] ^ 1 << draw.randrange(8)]) + frame[at + 1 :]
        yield frame


def random_run(draw: random.Random) -> bytes:
    pages = [
        FrameHeader(
            FrameType.PAGE,
            group=draw.choice([0, 0, 1, 60_000]),
            block=draw.choice([0, 1, 2, 3, 2**32 - 1]),
            num_tokens=draw.choice([0, 1, 16]),
        )
        for _ in range(draw.randint(1, 5))
    ]
    payloads = [memoryview(draw.randbytes(draw.choice([0, 32, 32, 33, 5000]))) for _ in pages]
    return encode_run(pages, payloads) + b"".join(payloads)


def random_payload(kind: FrameType, draw: random.Random) -> bytes:
    if kind is FrameType.ACK:
        return b""
    if draw.random() < 0.2:
        return draw.randbytes(draw.randrange(16))
    if kind is FrameType.PROGRESS:
        return draw.randbytes(16)
    if kind is FrameType.ATTACH:
        resumes = tuple(
            (draw.randrange(4), draw.choice([0, 1, 5, 2**40])) for _ in range(draw.randrange(3))
        )
        ids = [ASKED.transfer_id, "f" * 32]
        word = Attach(
            transfer_id=draw.choice(ids),
            capability=draw.choice([CAPABILITY, "0" * 32]),
            stream=draw.randrange(5),
            resumes=resumes,
        )
        return encode_attach(word)
    if kind is FrameType.END:
        numbers = [draw.choice([0, 1, 2, 2**40]) for _ in range(4)]
        names = ("num_pages", "num_answers", "num_page_bytes", "digest")
        epoch, num_words = draw.choice([0, 0, 1]), draw.choice([1, 1, 2])
        fields = dict(zip(names, numbers, strict=True))
        totals = TransferTotals(tokens_computed=0, epoch=epoch, num_words=num_words, **fields)
        return encode_totals(totals)
    return draw.randbytes(draw.randrange(40))


@given(seed=st.integers(0, 2**32), cut=st.integers(1, 5000))
def test_a_decoder_takes_no_more_memory_than_a_frame_may_have(seed, cut):
    draw = random.Random(seed)
    data = b"".join(random_frames(draw, 30)) + draw.randbytes(2000)
    held = Pages(32)
    decoder = FrameDecoder(
        allowed=FROM_SENDER,
        resolve=lambda header: held.resolve(header) if header.block < 9 else None,
    )
    tracemalloc.start()
    try:
        while data:
            target = decoder.buffer()
            num_bytes = min(cut, len(target), len(data))
            target[:num_bytes], data = data[:num_bytes], data[num_bytes:]
            decoder.received(num_bytes)
    except ProtocolError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < (10 << 20)


@contextlib.contextmanager
def no_stray_exceptions() -> Iterator[None]:
    """Fail if a callback or a task raised what nobody expected."""
    loop, strays = asyncio.get_running_loop(), []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: strays.append(context))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
    assert not strays


@contextlib.asynccontextmanager
async def hostile_peer(draw: random.Random) -> AsyncIterator[PeerClient]:
    """A prefill node that takes every request and sends random frames, over streams or by HTTP."""

    async def take(request: web.Request) -> web.Response:
        await request.read()
        body = encode_accepted(TransferAccepted(hit_tokens=0))
        return web.Response(status=201, body=body)

    async def stream(request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        transport.write(SWITCHING)
        await asyncio.sleep(0.001)
        for frame in random_frames(draw, 12):
            transport.write(frame)
        await asyncio.sleep(0.001)
        transport.close()
        return web.Response()

    async def frames(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for frame in random_frames(draw, 12):
            await response.write(frame)
        return response

    app = web.Application()
    app.add_routes(
        [
            web.post("/kv/v1/transfers", take),
            web.delete("/kv/v1/transfers/{transfer_id}", take),
            web.get(STREAM_PATH, stream),
            web.get(FRAMES_PATH, frames),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = PeerAddress("127.0.0.1", runner.addresses[0][1])
    client = PeerClient(address, replace(OPTIONS, stall_timeout_s=0.3))
    try:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            keeping = tasks.create_task(client.run())
            yield client
            keeping.cancel()
    finally:
        await client.close()
        await runner.cleanup()
        await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stream", "http"])
async def test_a_peer_that_sends_any_frames_in_any_order_is_a_transfer_error(way):
    draw = random.Random(17)
    with no_stray_exceptions():
        async with hostile_peer(draw) as client:
            client._uses_http = way == "http"
            for number in range(30):
                held = Pages(32)
                request = asked(transfer_id=f"{number:032d}", codec=draw.choice(["raw", "zstd"]))
                with pytest.raises((TransferError, Overloaded)):
                    async with client.pull(request, held) as pulling:
                        await finish(pulling)
                assert all(len(page) == 32 for page in held.pages.values())


@pytest.mark.slow
async def test_an_asker_that_says_anything_in_any_order_hurts_nobody_else():
    draw = random.Random(23)
    with no_stray_exceptions():
        async with channel(1.0, page_bytes=3000, streams=2) as (service, client):
            service.num_pages = 20
            await warm(client)
            for number in range(25):
                await client.open(ASKED)
                ports = [await hostile_port(client) for _ in range(2)]
                for frame in random_frames(draw, 12):
                    with contextlib.suppress(OSError):
                        draw.choice(ports).send_now([frame])
                        await asyncio.sleep(0)
                held = Pages(3000)
                await pull_all(client, held, asked(transfer_id=f"{number:032d}"))
                held.check(20)
                for port in ports:
                    port.close()
                service.transfers[ASKED.transfer_id].close("cancelled")
                service.transfers[ASKED.transfer_id].check()
                await ended(service.transfers.pop(ASKED.transfer_id))
            expected = service.channel._expected
            while expected._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def hostile_port(client: PeerClient) -> SocketPort:
    port = await connect(client.address, None)
    assert isinstance(port, SocketPort)
    assert await upgrade(port, client.address, STREAM_PATH, {}) == b""
    return port


ROUTES = {
    "/kv/v1/handshake": dump({"identity": IDENTITY.to_json()}),
    "/kv/v1/transfers": encode_transfer_request(ASKED),
    f"/kv/v1/transfers/{ASKED.transfer_id}/ack": dump({"capability": CAPABILITY}),
    "/kv/v1/hello": PARSERS["hello"][1],
    "/kv/v1/session": dump({"nonce": NONCE, "proof": NONCE}),
}


@pytest.mark.slow
async def test_no_body_of_any_route_is_our_own_error():
    draw = random.Random(3)
    odd = [None, True, 10**400, -1, 1e308, "\ud800", "A" * 32, [], [[1, 2]], {"a": 1}, "", 2**63]
    statuses = set()
    with no_stray_exceptions():
        async with channel(1.0) as (service, client), aiohttp.ClientSession() as session:
            for number in range(200):
                path = draw.choice(sorted(ROUTES))
                valid = ROUTES[path]
                body = json.dumps(changed(json.loads(valid), draw, draw.choice(odd))).encode()
                if number % 10 == 0:
                    body = draw.randbytes(draw.randrange(200))
                async with session.post(f"http://{client.address}{path}", data=body) as response:
                    statuses.add(response.status)
                    await response.read()
            for _ in range(60):
                word = base64.b64encode(b"".join(random_frames(draw, 1))).decode()
                url = f"http://{client.address}{FRAMES_PATH}"
                headers = {ATTACH_HEADER: word}
                if word and not word.startswith(
                    base64.b64encode(bytes([FrameType.ATTACH])).decode()[:1]
                ):
                    async with session.get(url, headers=headers) as response:
                        statuses.add(response.status)
            for transfer in service.transfers.values():
                transfer.close("cancelled")
    assert statuses <= {200, 201, 400, 401, 403, 404, 409, 422}
    assert {200, 201, 400} <= statuses


async def test_streams_that_leave_while_they_wait_for_a_transfer_leave_nothing():
    async with channel() as (service, client), aiohttp.ClientSession() as session:
        for number in range(20):
            word = Attach(transfer_id=f"{number:032d}", capability=CAPABILITY, stream=0)
            encoded = base64.b64encode(encode_frame(FrameType.ATTACH, encode_attach(word))).decode()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await session.get(
                        f"http://{client.address}{FRAMES_PATH}", headers={ATTACH_HEADER: encoded}
                    )
        expected = service.channel._expected
        while expected._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
