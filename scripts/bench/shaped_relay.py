#!/usr/bin/env python
"""A TCP relay on loopback that lets bytes through at a rate which may change at any time, run by live_policies.py.

Prints {"port": ...}; reads lines {"bytes_per_s": ...} (null: no limit) and answers each with
{"num_bytes": ...}, what has come down from the target so far. Ends with its standard input. All
connections share the rate, first come, first served; what goes up to the target is not held.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable

READ_BYTES = 16 << 10
BUFFER_BYTES = 64 << 10
"""Of a socket towards the target: little is on its way that no rate has been asked about."""
BURST_S = 0.01


class Rate:
    """When the next bytes may pass. Pure: times come in and waits go out."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        """When all that was let through so far has passed."""

    def wait_s(self, num_bytes: int, now_s: float) -> float:
        """Return how long these bytes have to wait; they count as passed after that."""
        if self.bytes_per_s is None:
            return 0.0
        begin_s = max(self._free_s, now_s)
        self._free_s = begin_s + num_bytes / self.bytes_per_s
        return max(0.0, self._free_s - now_s - BURST_S)


class ShapedRelay:
    """Forwards every connection to a port of this machine."""

    def __init__(self, target_port: int, rate: Rate) -> None:
        self.num_bytes = 0
        self._target_port = target_port
        self._rate = rate
        self._turn = asyncio.Lock()

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(writer.close)
            target = socket.socket()
            target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            target.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(
                    target, ("127.0.0.1", self._target_port)
                )
            except OSError:
                target.close()
                return
            theirs, to_them = await asyncio.open_connection(sock=target, limit=READ_BYTES)
            undo.callback(to_them.close)
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pump(reader, to_them, self._pass_at_once))
                    tasks.create_task(self._pump(theirs, writer, self._pass_in_turn))

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passing: Callable[[int], Awaitable[None]],
    ) -> None:
        while data := await reader.read(READ_BYTES):
            await passing(len(data))
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _pass_at_once(self, num_bytes: int) -> None:
        """What goes up is small."""

    async def _pass_in_turn(self, num_bytes: int) -> None:
        async with self._turn:
            wait_s = self._rate.wait_s(num_bytes, asyncio.get_running_loop().time())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
        self.num_bytes += num_bytes


async def serve(target_port: int) -> None:
    rate = Rate(None)
    relay = ShapedRelay(target_port, rate)
    server = await relay.start()
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if "bytes_per_s" in order:
            rate.bytes_per_s = order["bytes_per_s"]
        print(json.dumps({"num_bytes": relay.num_bytes}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, required=True)
    asyncio.run(serve(parser.parse_args().target))


if __name__ == "__main__":
    main()
