"""A sender lets little wait where the link is slow, so that first tokens overtake pages."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator

import pytest

from prfaas.transport import sending
from prfaas.transport.accepting import UNSENT_BYTES
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.flow import EgressBudget
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.ports import SocketPort
from prfaas.transport.seals import CHECKSUM_BYTES
from prfaas.transport.sending import MIN_UNSENT_BYTES, RUN_S, UNSENT_S, SendingStream
from prfaas.transport.tcpinfo import TcpInfo, parse_tcp_info
from prfaas.transport.wire import MAX_RUN_PAGES, FrameType, encode_frame
from tests.frame_scanner import FrameScanner
from tests.transport.channels import place

PAGE_BYTES = 256 << 10
KIB = 1 << 10
NUM_PAGES = 64
RUN_BYTES_PER_S = 5 * KIB / RUN_S
CAPABILITY = "ab" * 16

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this kernel lets nobody say how much waits"
)


def unsent_limit(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # no page fits: the sender waits
    near.setblocking(False)
    far.setblocking(False)
    return near, far


@contextlib.asynccontextmanager
async def served(
    rate_bytes_per_s: float,
    monkeypatch: pytest.MonkeyPatch,
    *,
    page_bytes: int,
    num_pages: int,
    budget: EgressBudget,
) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """A transfer that is sent over a connection which the kernel says is so fast: (sender's, asker's)."""
    info = parse_tcp_info(bytes(256))
    assert info is not None

    def read(sock: socket.socket) -> TcpInfo:
        return dataclasses.replace(info, delivery_rate_bytes_per_s=rate_bytes_per_s)

    monkeypatch.setattr(sending, "read_tcp_info", read)
    monkeypatch.setattr(sending, "LOOK_S", 0.0)
    near, far = connected()
    port = SocketPort(near)
    page = memoryview(bytearray(page_bytes))
    transfer = OutgoingTransfer(
        transfer_id="0" * 32,
        page_view=lambda place: page,
        capability=CAPABILITY,
        credit_bytes=num_pages * page_bytes,
    )
    for block in range(num_pages):
        transfer.put_page(place(block))

    async def find(attach: Attach) -> OutgoingTransfer:
        return transfer

    stream = SendingStream(port, find=find, budget=budget, count_sent=lambda n: None)
    loop = asyncio.get_running_loop()
    async with (
        asyncio.timeout(30),
        asyncio.TaskGroup() as tasks,
        contextlib.AsyncExitStack() as undo,
    ):
        undo.callback(far.close)
        undo.callback(port.close)
        tasks.create_task(stream.run())
        attach = Attach(transfer_id="0" * 32, capability=CAPABILITY, stream=0)
        await loop.sock_sendall(far, encode_frame(FrameType.ATTACH, encode_attach(attach)))
        yield near, far
        transfer.close("stopped")
        stream.close()


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "expected"),
    [(1e3, MIN_UNSENT_BYTES), (4e6, round(UNSENT_S * 4e6)), (1e9, UNSENT_BYTES)],
)
async def test_what_waits_in_the_kernel_is_as_much_as_goes_out_in_an_instant(
    rate_bytes_per_s, expected, monkeypatch
):
    async with served(
        rate_bytes_per_s,
        monkeypatch,
        page_bytes=PAGE_BYTES,
        num_pages=NUM_PAGES,
        budget=EgressBudget(None, 1),
    ) as (near, far):
        loop = asyncio.get_running_loop()
        num_bytes = 0
        while num_bytes < NUM_PAGES * PAGE_BYTES:
            num_bytes += len(await loop.sock_recv(far, 1 << 16))
        limit = unsent_limit(near)
    assert limit == expected


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "limit_bytes_per_s", "longest"),
    [
        (1e5, None, 1),
        (RUN_BYTES_PER_S, None, 5),
        (1e12, None, MAX_RUN_PAGES),
        (1e12, RUN_BYTES_PER_S, 5),
    ],
)
async def test_a_run_is_no_longer_than_what_goes_out_in_an_instant(
    rate_bytes_per_s, limit_bytes_per_s, longest, monkeypatch
):
    """Before it is known how fast a stream is, each page goes alone."""
    found: list[int] = []  # pages of each frame, as its header says
    async with served(
        rate_bytes_per_s,
        monkeypatch,
        page_bytes=KIB,
        num_pages=512,
        budget=EgressBudget(limit_bytes_per_s, 1 << 20),
    ) as (_, far):
        loop = asyncio.get_running_loop()
        scanner, data, num_bytes = FrameScanner(CHECKSUM_BYTES), b"", 0
        while b"\r\n\r\n" not in data:
            data += await loop.sock_recv(far, 1 << 16)
        data = data.partition(b"\r\n\r\n")[2]
        while True:
            for part in scanner.feed(data):
                num_bytes += len(part.data)
                if part.start == 0:
                    found.append(int.from_bytes(part.data[4:6], "little") or 1)
            if num_bytes >= 512 * KIB:
                break
            data = await loop.sock_recv(far, 1 << 16)
    assert found[0] == 1
    assert max(found) == longest
