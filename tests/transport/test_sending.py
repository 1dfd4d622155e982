"""A sender lets little wait in the kernel where the link is slow, so that first tokens overtake pages."""

import asyncio
import contextlib
import dataclasses
import socket

import pytest

from prfaas.transport import sending
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.flow import EgressBudget
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.ports import SocketPort
from prfaas.transport.sending import MIN_UNSENT_BYTES, UNSENT_BYTES, UNSENT_S, SendingStream
from prfaas.transport.tcpinfo import TcpInfo, parse_tcp_info
from prfaas.transport.wire import FrameType, encode_frame
from tests.transport.channels import place

PAGE_BYTES = 256 << 10
NUM_PAGES = 64
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


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "expected"),
    [(1e3, MIN_UNSENT_BYTES), (4e6, round(UNSENT_S * 4e6)), (1e9, UNSENT_BYTES)],
)
async def test_what_waits_in_the_kernel_is_as_much_as_goes_out_in_an_instant(
    rate_bytes_per_s, expected, monkeypatch
):
    info = parse_tcp_info(bytes(256))
    assert info is not None

    def read(sock: socket.socket) -> TcpInfo:
        return dataclasses.replace(info, delivery_rate_bytes_per_s=rate_bytes_per_s)

    monkeypatch.setattr(sending, "read_tcp_info", read)
    monkeypatch.setattr(sending, "LOOK_S", 0.0)
    near, far = connected()
    port = SocketPort(near)
    page = memoryview(bytearray(PAGE_BYTES))
    transfer = OutgoingTransfer(
        transfer_id="0" * 32,
        page_view=lambda place: page,
        capability=CAPABILITY,
        credit_bytes=NUM_PAGES * PAGE_BYTES,
    )
    for block in range(NUM_PAGES):
        transfer.put_page(place(block))

    async def find(attach: Attach) -> OutgoingTransfer:
        return transfer

    stream = SendingStream(port, find=find, budget=EgressBudget(None, 1), count_sent=lambda n: None)
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
        num_bytes = 0
        while num_bytes < NUM_PAGES * PAGE_BYTES:
            num_bytes += len(await loop.sock_recv(far, 1 << 16))
        limit = unsent_limit(near)
        transfer.close("stopped")
        stream.close()
    assert limit == expected
