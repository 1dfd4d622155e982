"""Measures the link to a running prefill node with its own KV channel: see docs/link.md.

Pages come as in a real transfer, over streams that are open already; their numbers are made up. All
figures of a rate are goodput: bytes of pages by the seconds from the request to the last verified
page, headers and retransmits not counted.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from prfaas.bench.received_pages import ReceivedPages
from prfaas.bench.seal_costs import GuardCost, guard_costs
from prfaas.clock import Clock
from prfaas.errors import TransferError
from prfaas.transport.address import PeerAddress
from prfaas.transport.client import PeerClient
from prfaas.transport.handshake import Identity, check_compatible
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.measuring import (
    MAX_BYTES,
    MAX_PAGES,
    MeasureRequest,
    SenderReport,
    measured_numbers,
)
from prfaas.transport.messages import CODEC_NAMES, CodecName, PeerStatus
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity

PAGE_BYTES = 128 << 10
FIRST_BYTES = 1 << 20
"""Of the first try at a number of streams, which says how many bytes fill the time."""
GROWTH = 8
"""Of bytes from one try to the next, at most: the first is over before a window has opened."""
NUM_PINGS = 10
HELD_BYTES = 64 << 20
"""Pages that are received into, in turn."""
FIXED_CODECS: tuple[CodecName, ...] = tuple(n for n in CODEC_NAMES if not n.startswith("auto"))

ASKER = Identity(
    model_fingerprint="",
    tokenizer_fingerprint="",
    template_fingerprint="",
    kv_dtype="",
    block_tokens=0,
    layout="",
    numerics_fingerprint="",
)
"""Of somebody who has no model and only measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measurement."""

    streams: int
    codec: CodecName
    num_bytes: int
    """Of pages, as they are decoded."""
    num_wire_bytes: int
    seconds: float
    cpu_s: float
    """Of this process."""
    sender: SenderReport

    @property
    def bytes_per_s(self) -> float:
        """Goodput in decoded bytes."""
        return self.num_bytes / self.seconds

    @property
    def loss_fraction(self) -> float:
        """Part of what TCP sent that was sent again."""
        return self.sender.bytes_retrans / max(1, self.sender.bytes_sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What a link was found to be."""

    peer: str
    status: PeerStatus
    guard: str
    """What guards the frames on this link: checksum, mac or tls."""
    rtt_s: float
    """Least round trip that the sender's TCP saw."""
    request_s: float
    """Least time of a handshake over an open connection: a round trip and two event loops."""
    rates: list[Rate]
    """Raw pages, by number of streams."""
    codecs: list[Rate]
    costs: list[GuardCost]

    @property
    def best(self) -> Rate:
        """The fastest of the raw ones."""
        return max(self.rates, key=lambda rate: rate.bytes_per_s)


class LinkBench:
    """One client of a prefill node, with a number of streams open."""

    def __init__(
        self,
        client: PeerClient,
        streams: int,
        numbers: KvNumbers,
        clock: Clock,
        views: Sequence[memoryview],
    ) -> None:
        self._client = client
        self._streams = streams
        self._numbers = numbers
        self._clock = clock
        self._views = views

    async def open(self) -> None:
        """Open all streams. Raises TransferError."""
        for _ in range(self._streams - self._client.streams.num_open):
            self._client.streams.put(await self._client.dial())

    async def measure(self, num_bytes: int, codec: CodecName = "raw") -> Rate:
        """Return how so many bytes fared. Raises TransferError or Overloaded."""
        pages = ReceivedPages(self._views)
        page_bytes = len(self._views[0])
        asked = MeasureRequest(
            transfer_id=secrets.token_hex(16),
            capability=secrets.token_hex(16),
            num_bytes=num_bytes,
            page_bytes=page_bytes,
            codec=codec,
        )
        await self.open()
        began_s, began_cpu_s = self._clock(), time.process_time()
        try:
            async with self._client.measure(asked, pages, ASKER, numbers=self._numbers) as pulling:
                while not pulling.is_finished:
                    await pulling.step()
                seconds = self._clock() - began_s
                cpu_s = time.process_time() - began_cpu_s
                pulling.acknowledge()
        except BaseException:
            await self._client.cancel(asked.transfer_id)
            raise
        return Rate(
            streams=self._streams,
            codec=codec,
            num_bytes=pages.num_bytes,
            num_wire_bytes=pages.num_wire_bytes,
            seconds=seconds,
            cpu_s=cpu_s,
            sender=await self._client.measured(asked, ASKER),
        )

    async def measure_for(self, seconds: float, codec: CodecName = "raw") -> Rate:
        """Return how as many bytes fared as take about so many seconds."""
        num_bytes = FIRST_BYTES
        limit = min(MAX_BYTES, MAX_PAGES * len(self._views[0]))
        while True:
            rate = await self.measure(num_bytes, codec)
            wanted = min(round(rate.bytes_per_s * seconds), limit)
            if wanted <= 1.25 * num_bytes or rate.seconds > 0.75 * seconds:
                return rate
            num_bytes = min(wanted, GROWTH * num_bytes)


async def measure_link(
    address: PeerAddress,
    options: TransportOptions,
    security: ChannelSecurity,
    *,
    streams: Sequence[int],
    seconds: float,
    codecs: Sequence[CodecName],
    clock: Clock,
    progress: Callable[[str, int, int], None],
) -> LinkFigures:
    """Return what the link to a running prefill node is.

    `streams` names at least one number. Raises TransferError where there is no such node or it speaks
    another version, Overloaded where it is measured already.
    """
    total = len(streams) + len(codecs)
    done: list[Rate] = []

    async def measured(number: int, names: Sequence[CodecName]) -> None:
        async with _client(address, replace(options, streams=number), security) as client:
            status = await client.handshake(ASKER)
            theirs = status.identity
            ours = replace(theirs, protocol_version=ASKER.protocol_version)
            check_compatible(ours, theirs, accept_approximate=False)
            if not status.is_ready:
                raise TransferError(f"peer {client.address} is not ready: {status.reason}")
            numbers = measured_numbers(status.identity.kv_dtype)
            bench = LinkBench(client, number, numbers, clock, views)
            for name in names:
                progress("measure", len(done), total)
                done.append(await bench.measure_for(seconds, name))
            request_times_s.append(await _request_s(client, clock))
            statuses.append(status)

    views = [memoryview(bytearray(PAGE_BYTES)) for _ in range(HELD_BYTES // PAGE_BYTES)]
    request_times_s: list[float] = []
    statuses: list[PeerStatus] = []
    for number in streams:
        await measured(number, ["raw"])
    if codecs:
        await measured(max(streams), codecs)
    progress("measure", total, total)
    rates, by_codec = done[: len(streams)], done[len(streams) :]
    costs = await asyncio.to_thread(guard_costs, clock)
    rtts = [rate.sender.min_rtt_s for rate in rates if rate.sender.min_rtt_s]
    return LinkFigures(
        peer=str(address),
        status=statuses[-1],
        guard=_guard(security),
        rtt_s=min(rtts, default=min(request_times_s)),
        request_s=min(request_times_s),
        rates=rates,
        codecs=by_codec,
        costs=costs,
    )


@contextlib.asynccontextmanager
async def _client(
    address: PeerAddress, options: TransportOptions, security: ChannelSecurity
) -> AsyncIterator[PeerClient]:
    client = PeerClient(address, options, security=security)
    try:
        yield client
    finally:
        await client.close()


async def _request_s(client: PeerClient, clock: Clock) -> float:
    times_s: list[float] = []
    for _ in range(NUM_PINGS):
        began_s = clock()
        await client.handshake(ASKER)
        times_s.append(clock() - began_s)
    return min(times_s)


def _guard(security: ChannelSecurity) -> str:
    if security.tls is not None:
        return "tls"
    return "checksum" if security.cluster_key is None else "mac"
