#!/usr/bin/env python
"""One end of a link that scripts/bench/link.py measures: a process of its own, run by it.

    serve kv     a sender of pages: the routes of the KV channel, without an engine behind them
    pull kv      its receiver
    serve plain  uvloop sockets that send the same pages one behind the other, and nothing else
    pull plain   their receiver

A server prints {"port": ...} and ends with its standard input. A receiver opens its connections,
prints {"is_open": true}, and then reads lines {"num_bytes": ...} and answers each with how that
went: the connections are warm. Seconds are from the request to the last byte, at the receiver.
"""

import argparse
import asyncio
import itertools
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import uvloop
from aiohttp import web

from prfaas.bench.link import ASKER, LinkBench
from prfaas.cache.pool import PagePool
from prfaas.clock import monotonic_s
from prfaas.transport import server as kv_server
from prfaas.transport import stream_seals
from prfaas.transport.address import PeerAddress
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.measure_routes import MeasureRoutes
from prfaas.transport.measuring import MadeUpPages, Measurements, measured_numbers
from prfaas.transport.messages import CodecName, PeerStatus, TransferAccepted, TransferRequest
from prfaas.transport.options import TransportOptions
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.seals import CHECKSUM_BYTES
from prfaas.transport.security import asker_security, peer_security
from prfaas.transport.tcpinfo import set_congestion

KV_DTYPE = "float32"


def pages_of(options: argparse.Namespace) -> list[memoryview]:
    """Return the pages of a real pool, touched and filled."""
    page_bytes = options.page_kib << 10
    pool = PagePool(options.pool_mib << 20, page_bytes)
    with pool.lock:
        taken = pool.try_take([1] * pool.num_pages, is_transfer=True)
    assert taken is not None, "a fresh pool is free"
    source = MadeUpPages(KV_DTYPE)
    views = [pool.view(entry.pages[0]) for entry in taken]
    for number, view in enumerate(views):
        view[:] = source.view(number, page_bytes)
    return views


# ---------------------------------------------------------------- the KV channel


class NoSeal:
    """Tags that say nothing: what frames cost without checksums. There is no such setting."""

    tag_bytes = CHECKSUM_BYTES

    def begin(self, fields: bytes) -> "NoSeal":
        return self

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take no note."""

    def finish(self) -> bytes:
        return bytes(CHECKSUM_BYTES)


class PoolPages:
    """A PageSource: the pages of a pool in turn."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views

    def view(self, number: int, num_bytes: int) -> memoryview:
        return self._views[number % len(self._views)]


class PageService:
    """A TransferService that has nothing but measurements."""

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements

    def status(self) -> PeerStatus:
        return PeerStatus(
            identity=ASKER,
            is_ready=True,
            reason="",
            num_waiting_tokens=0,
            prefill_tokens_per_s=0.0,
        )

    async def open(self, asked: TransferRequest) -> TransferAccepted:
        raise NotImplementedError(f"{asked.transfer_id}: nothing but measurements is served")

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        return self._measurements.transfer(transfer_id)

    def cancel(self, transfer_id: str) -> bool:
        return self._measurements.cancel(transfer_id)

    def count_sent(self, num_bytes: int) -> None:
        """Nobody asks."""


def transport(options: argparse.Namespace, role: str) -> TransportOptions:
    """Return the settings of one end; a `directory` holds key and certificates."""
    files: dict[str, Any] = {}
    directory = Path(options.files)
    if options.guard == "mac":
        files["cluster_key_file"] = str(directory / "cluster.key")
    if options.guard == "tls" and role == "serve":
        files |= {"tls_cert": str(directory / "cert.pem"), "tls_key": str(directory / "key.pem")}
    if options.guard == "tls" and role == "pull":
        files["tls_ca"] = str(directory / "cert.pem")
    return TransportOptions(
        streams=options.streams,
        tcp_congestion=options.congestion,
        stall_timeout_s=20.0,
        **files,
    )


async def serve_kv(options: argparse.Namespace) -> None:
    security = peer_security(transport(options, "serve"))
    measurements = Measurements(KV_DTYPE, PoolPages(pages_of(options)))
    key = security.cluster_key
    channel = kv_server.KvChannel(
        PageService(measurements),
        gate=None if key is None else PeerSide(key, identity=ASKER, epoch="e" * 64),
        congestion=options.congestion,
    )
    app = web.Application()
    app.add_routes([*channel.routes(), *MeasureRoutes(channel, measurements).routes()])
    runner = web.AppRunner(app, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, options.host, 0, ssl_context=security.tls).start()
    say({"port": runner.addresses[0][1]})
    await until_stdin_ends()
    channel.close()
    await runner.cleanup()


async def pull_kv(options: argparse.Namespace) -> None:
    settings = transport(options, "pull")
    client = PeerClient(
        PeerAddress(options.host, options.port), settings, security=asker_security(settings)
    )
    await client.handshake(ASKER)
    numbers = measured_numbers(KV_DTYPE)
    bench = LinkBench(client, options.streams, numbers, monotonic_s, pages_of(options))
    await bench.open()

    async def run(num_bytes: int, codec: CodecName = "raw") -> dict[str, Any]:
        rate = await bench.measure(num_bytes, codec)
        return {
            "num_bytes": rate.num_bytes,
            "seconds": rate.seconds,
            "cpu_s": rate.cpu_s,
            "sender_cpu_s": rate.sender.cpu_s,
            "num_retransmits": rate.sender.num_retransmits,
            "wire_fraction": rate.num_wire_bytes / rate.num_bytes,
            "congestion": rate.sender.congestion,
        }

    await answer_lines(run)
    await client.close()


# ---------------------------------------------------------------- plain sockets


async def serve_plain(options: argparse.Namespace) -> None:
    """Send, over each connection, as many whole pages as its receiver asks for."""
    loop = asyncio.get_running_loop()
    views = pages_of(options)
    listener = socket.create_server((options.host, 0))
    listener.setblocking(False)
    say({"port": listener.getsockname()[1]})

    numbers = itertools.cycle(range(len(views)))  # of all connections: pages are not read twice

    async def send(connection: socket.socket) -> None:
        tune(connection, options.congestion)
        order = memoryview(bytearray(8))
        with connection:
            while await receive(connection, order):
                for _ in range(int.from_bytes(order, "little")):
                    await loop.sock_sendall(connection, views[next(numbers)])

    async with asyncio.TaskGroup() as tasks:

        async def accept() -> None:
            while True:
                connection, _ = await loop.sock_accept(listener)
                tasks.create_task(send(connection))

        accepting = tasks.create_task(accept())
        await until_stdin_ends()
        accepting.cancel()
    listener.close()


async def pull_plain(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    views = pages_of(options)
    page_bytes = options.page_kib << 10
    connections = []
    for _ in range(options.streams):
        connection = socket.socket()
        connection.setblocking(False)
        tune(connection, options.congestion)
        await loop.sock_connect(connection, (options.host, options.port))
        connections.append(connection)

    async def take(connection: socket.socket, first: int, num_pages: int) -> None:
        await loop.sock_sendall(connection, num_pages.to_bytes(8, "little"))
        for number in range(first, first + num_pages):
            if not await receive(connection, views[number % len(views)]):
                raise ConnectionError("the sender left")

    async def run(num_bytes: int) -> dict[str, Any]:
        num_pages = -(-num_bytes // page_bytes)
        shares = [num_pages * at // len(connections) for at in range(len(connections) + 1)]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for connection, first, last in zip(connections, shares, shares[1:], strict=False):
                tasks.create_task(take(connection, first, last - first))
        return {
            "num_bytes": num_pages * page_bytes,
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
        }

    await answer_lines(run)
    for connection in connections:
        connection.close()


async def receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill the target; False if the other end has left before its first byte."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < len(target):
        num_bytes = await loop.sock_recv_into(connection, target[filled:])
        if not num_bytes:
            return False
        filled += num_bytes
    return True


def tune(sock: socket.socket, congestion: str | None) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion is not None:
        set_congestion(sock, congestion)


# ---------------------------------------------------------------- talking to link.py


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


async def stdin_line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


async def until_stdin_ends() -> None:
    while await stdin_line():
        continue


async def answer_lines(run: Callable[..., Awaitable[dict[str, Any]]]) -> None:
    say({"is_open": True})
    while line := await stdin_line():
        say(await run(**json.loads(line)))


ENDS = {
    ("serve", "kv"): serve_kv,
    ("pull", "kv"): pull_kv,
    ("serve", "plain"): serve_plain,
    ("pull", "plain"): pull_plain,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("serve", "pull"))
    parser.add_argument("kind", choices=("kv", "plain"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--page-kib", type=int, default=128)
    parser.add_argument("--pool-mib", type=int, default=256)
    parser.add_argument("--congestion")
    parser.add_argument("--guard", choices=("none", "checksum", "mac", "tls"), default="checksum")
    parser.add_argument("--files", default=".", help="directory of cluster.key, cert.pem, key.pem")
    options = parser.parse_args()
    if options.guard == "none":
        vars(stream_seals)["NumberedChecksumSeal"] = NoSeal
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ENDS[options.role, options.kind](options))


if __name__ == "__main__":
    main()
