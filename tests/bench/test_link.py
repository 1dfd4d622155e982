"""A link is measured over the KV channel of a running node, and the figures are what happened."""

import asyncio
import dataclasses

import pytest

from prfaas.bench import link
from prfaas.bench.link import ASKER, LinkBench, LinkFigures, measure_link
from prfaas.bench.link_report import to_json, to_lines
from prfaas.clock import monotonic_s
from prfaas.errors import IncompatiblePeer, TransferError
from prfaas.transport.auth import PeerSide
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.measuring import measured_numbers
from prfaas.transport.messages import PeerStatus
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from tests.transport.measured import measured_node
from tests.transport.samples import IDENTITY

KEY = ClusterKey(b"a secret of the cluster")
LAYOUT = "v2: full page 6400 layers 0,4; state state 10000 page 6400 layers 1"
PAGE_BYTES = 64 << 10


def no_progress(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch):
    monkeypatch.setattr(link, "guard_costs", lambda clock: [])
    monkeypatch.setattr(link, "FIRST_BYTES", 1 << 18)


async def figures_of(security: ChannelSecurity | None = None) -> LinkFigures:
    key = None if security is None else security.cluster_key
    gate = None if key is None else PeerSide(key, identity=IDENTITY, epoch="e" * 64)
    async with measured_node(gate=gate) as (_, client):
        return await measure_link(
            client.address,
            TransportOptions(),
            security or ChannelSecurity(),
            streams=[1, 2],
            seconds=0.02,
            codecs=["zstd"],
            clock=monotonic_s,
            progress=no_progress,
        )


@pytest.mark.parametrize("key", [None, KEY])
async def test_a_node_is_measured_with_each_number_of_streams_and_each_codec(key):
    figures = await figures_of(ChannelSecurity(cluster_key=key))
    assert figures.guard == ("checksum" if key is None else "mac")
    assert [rate.streams for rate in figures.rates] == [1, 2]
    assert [rate.codec for rate in figures.codecs] == ["zstd"]
    assert all(rate.num_wire_bytes == rate.num_bytes for rate in figures.rates)
    assert figures.codecs[0].num_wire_bytes < figures.codecs[0].num_bytes
    assert figures.best in figures.rates
    assert 0 < figures.rtt_s <= figures.request_s
    assert figures.status.identity == IDENTITY


async def test_bytes_grow_until_they_fill_the_time():
    async with measured_node() as (_, client):
        views = [memoryview(bytearray(PAGE_BYTES)) for _ in range(16)]
        bench = LinkBench(client, 2, measured_numbers("float32"), monotonic_s, views)
        rate = await bench.measure_for(0.05)
        assert rate.num_bytes >= link.FIRST_BYTES
        assert rate.num_bytes % PAGE_BYTES == 0
        assert rate.sender.bytes_sent >= rate.num_wire_bytes
        assert rate.loss_fraction < 1


async def test_a_measurement_that_fails_is_cancelled():
    async with measured_node() as (service, client):
        views = [memoryview(bytearray(PAGE_BYTES))]  # too few for two streams, in the end
        bench = LinkBench(client, 2, measured_numbers("float32"), monotonic_s, views)

        async def until_it_fails() -> None:
            while True:
                await bench.measure(64 * PAGE_BYTES)

        with pytest.raises(TransferError, match="pages at once"):
            await until_it_fails()
        views.extend(memoryview(bytearray(PAGE_BYTES)) for _ in range(8))
        while not service.measurements.is_idle:  # noqa: ASYNC110  # its streams notice in turns
            await asyncio.sleep(0.002)
        assert (await bench.measure(PAGE_BYTES)).num_bytes == PAGE_BYTES


async def test_a_node_that_is_not_there_is_a_transfer_error():
    async with measured_node() as (_, client):
        address = client.address
    with pytest.raises(TransferError):
        await measure_link(
            address,
            TransportOptions(),
            ChannelSecurity(),
            streams=[1],
            seconds=0.02,
            codecs=[],
            clock=monotonic_s,
            progress=no_progress,
        )


async def test_a_node_of_another_version_is_told_from_ours_before_anything_is_measured(monkeypatch):
    theirs = ASKER.protocol_version
    monkeypatch.setattr(link, "ASKER", dataclasses.replace(ASKER, protocol_version=theirs + 1))
    async with measured_node() as (service, client):
        with pytest.raises(IncompatiblePeer, match=f"{theirs + 1} here, {theirs} there"):
            await measure_link(
                client.address,
                TransportOptions(),
                ChannelSecurity(),
                streams=[1],
                seconds=0.02,
                codecs=[],
                clock=monotonic_s,
                progress=no_progress,
            )
        assert service.measurements.is_idle


def with_status(figures: LinkFigures, layout: str, tokens_per_s: float) -> LinkFigures:
    status = PeerStatus(
        identity=dataclasses.replace(ASKER, layout=layout, block_tokens=64),
        is_ready=True,
        reason="",
        num_waiting_tokens=0,
        prefill_tokens_per_s=tokens_per_s,
    )
    return dataclasses.replace(figures, status=status)


async def test_the_report_says_what_was_measured_and_what_follows():
    figures = with_status(await figures_of(), LAYOUT, 1e6)
    report = to_json(figures, 1000.0)
    assert [each["streams"] for each in report["streams"]] == [1, 2]
    assert report["streams"][0]["wire_fraction"] == 1
    routing = report["routing"]
    assert (routing["kv_bytes_per_token"], routing["tail_bytes"]) == (200, 10_000)
    assert routing["threshold_tokens"] > 0
    text = "\n".join(to_lines(report))
    assert f"--threshold-tokens {routing['threshold_tokens']}" in text
    assert "zstd" in text


async def test_the_report_says_why_there_is_no_threshold():
    figures = await figures_of()
    unknown = to_json(with_status(figures, "scripted", 0.0), 1000.0)
    assert "'scripted' is not the layout" in list(to_lines(unknown))[-1]
    asked = list(to_lines(to_json(with_status(figures, LAYOUT, 0.0), None)))
    assert asked[-1].startswith("--local-tokens-per-s N")
    assert any("has not prefilled yet" in line for line in asked)
    never = list(to_lines(to_json(with_status(figures, LAYOUT, 10.0), 1e6)))
    assert "no prompt is sooner" in never[-1]
