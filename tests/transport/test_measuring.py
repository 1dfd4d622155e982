"""A link is measured by transfers of made-up pages: bounded, one at a time, for whoever may ask."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadRequest, Overloaded, PromptRefused, ProtocolError, TransferError
from prfaas.transport import measuring
from prfaas.transport.auth import PeerSide
from prfaas.transport.client import PeerClient
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.codec import decode_page, encode_page
from prfaas.transport.measuring import (
    MadeUpPages,
    Measurements,
    MeasureRequest,
    SenderReport,
    encode_measure_request,
    encode_sender_report,
    measured_numbers,
    parse_measure_request,
    parse_sender_report,
    sender_report,
)
from prfaas.transport.messages import CODEC_NAMES
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.tcpinfo import parse_tcp_info
from prfaas.transport.wire import Codec
from tests.transport.channels import finish, warm
from tests.transport.measured import PAGE_BYTES, MeasuredService, OnePage, Sink, measured_node
from tests.transport.samples import IDENTITY

ASKED = MeasureRequest(
    transfer_id="0123456789abcdef" * 2,
    capability="ab" * 16,
    num_bytes=10 * PAGE_BYTES,
    page_bytes=PAGE_BYTES,
)
KEY = ClusterKey(b"a secret of the cluster")


async def measure(client: PeerClient, asked: MeasureRequest = ASKED) -> Sink:
    sink = Sink()
    numbers = measured_numbers("float32")
    async with client.measure(asked, sink, IDENTITY, numbers=numbers) as pulling:
        await finish(pulling)
    return sink


async def at_rest(service: MeasuredService) -> None:
    while service.measurements.transfer(ASKED.transfer_id) is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def expected_pages(num_pages: int) -> dict[int, bytearray]:
    made_up = MadeUpPages("float32")
    return {n: bytearray(made_up.view(n, PAGE_BYTES)) for n in range(num_pages)}


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
async def test_what_was_asked_for_comes_whole_and_the_sockets_tell_of_it(codec):
    async with measured_node() as (service, client):
        await warm(client)
        sink = await measure(client, dataclasses.replace(ASKED, codec=codec))
        assert sink.pages == expected_pages(10)
        assert sink.totals is not None
        assert sink.totals.num_pages == 10
        report = await client.measured(ASKED, IDENTITY)
        assert report.bytes_sent > sink.totals.num_page_bytes
        assert report.congestion
        assert report.min_rtt_s > 0
        await at_rest(service)


async def test_a_second_measurement_waits_for_the_first_ones_end():
    other = dataclasses.replace(ASKED, transfer_id="f" * 32)
    async with measured_node() as (service, client):
        async with client.measure(
            ASKED, Sink(), IDENTITY, numbers=measured_numbers("float32")
        ) as pulling:
            with pytest.raises(Overloaded, match="another measurement"):
                await measure(client, other)
            await finish(pulling)
        await at_rest(service)
        assert (await measure(client, other)).pages == expected_pages(10)


async def test_pages_are_queued_in_turns_and_all_of_them_come(monkeypatch):
    monkeypatch.setattr(measuring, "QUEUED_AT_ONCE", 3)
    async with measured_node() as (service, client):
        assert (await measure(client)).pages == expected_pages(10)
        await at_rest(service)


async def test_who_leaves_early_cancels_and_makes_room():
    async with measured_node() as (service, client):
        async with client.measure(ASKED, Sink(), IDENTITY, numbers=measured_numbers("float32")):
            pass
        await client.cancel(ASKED.transfer_id)
        await at_rest(service)
        assert (await measure(client)).pages == expected_pages(10)


async def test_a_measurement_ends_at_its_time_limit(monkeypatch):
    monkeypatch.setattr(measuring, "MAX_S", 0.05)
    async with measured_node() as (service, client):
        numbers = measured_numbers("float32")
        asked = dataclasses.replace(ASKED, num_bytes=1 << 30)
        async with client.measure(asked, OnePage(), IDENTITY, numbers=numbers) as pulling:
            await at_rest(service)
            with pytest.raises(TransferError):
                await finish(pulling)


@pytest.mark.parametrize(
    "change",
    [
        {"page_bytes": PAGE_BYTES + 8},
        {"num_bytes": measuring.MAX_BYTES, "page_bytes": measuring.MIN_PAGE_BYTES},
    ],
)
async def test_more_than_the_bounds_is_refused(change):
    async with measured_node() as (_, client):
        with pytest.raises(PromptRefused, match="at most"):
            await measure(client, dataclasses.replace(ASKED, **change))


async def test_only_the_asker_gets_the_report():
    async with measured_node() as (_, client):
        with pytest.raises(TransferError, match="no such measurement"):
            await client.measured(ASKED, IDENTITY)
        await measure(client)
        stranger = dataclasses.replace(ASKED, capability="cd" * 16)
        with pytest.raises(TransferError, match="somebody else's"):
            await client.measured(stranger, IDENTITY)


async def test_a_gate_lets_nobody_measure_without_the_key():
    gate = PeerSide(KEY, identity=IDENTITY, epoch="e" * 64)
    async with measured_node(gate=gate) as (_, client):
        with pytest.raises(TransferError, match="proof"):
            await measure(client)
    async with measured_node(gate=gate, asker=ChannelSecurity(cluster_key=KEY)) as (_, client):
        await client.handshake(IDENTITY)
        assert (await measure(client)).pages == expected_pages(10)
        assert (await client.measured(ASKED, IDENTITY)).bytes_sent > 10 * PAGE_BYTES


def test_a_request_survives_the_wire():
    assert parse_measure_request(encode_measure_request(ASKED)) == ASKED


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 0},
        {"num_bytes": measuring.MAX_BYTES + 1},
        {"page_bytes": measuring.MAX_PAGE_BYTES + 1},
        {"codec": "zip"},
        {"capability": "short"},
    ],
)
def test_a_request_out_of_bounds_is_no_request(change):
    [name] = change
    with pytest.raises(ProtocolError, match=name):
        parse_measure_request(encode_measure_request(dataclasses.replace(ASKED, **change)))


def test_a_report_survives_the_wire():
    report = SenderReport(
        num_retransmits=1, bytes_sent=2, bytes_retrans=3, min_rtt_s=0.5, congestion="bbr", cpu_s=0.1
    )
    assert parse_sender_report(encode_sender_report(report)) == report


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_report_counts_only_what_grew(first, second):
    info = parse_tcp_info(bytes(256))
    assert info is not None
    before = [None, dataclasses.replace(info, bytes_sent=first)]
    after = [dataclasses.replace(info, bytes_sent=second, min_rtt_s=0.25), None]
    report = sender_report(before, after, congestion="", cpu_s=0.0)
    assert report.bytes_sent == max(0, second - first)
    assert report.num_retransmits == 0
    assert report.min_rtt_s == 0.25


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "unknown"])
@pytest.mark.parametrize("codec", list(Codec))
def test_made_up_pages_go_through_every_codec(dtype, codec):
    numbers = measured_numbers(dtype).of(0)
    page = MadeUpPages(dtype).view(3, PAGE_BYTES)
    assert page.readonly
    used, encoded = encode_page(codec, page, numbers)
    assert len(encoded) <= len(page)
    if used is Codec.RAW:
        assert dtype == "unknown" or codec in {Codec.RAW, Codec.FP16}
    elif used is Codec.ZSTD:
        assert decode_page(used, bytes(encoded), PAGE_BYTES, numbers) == page
    elif dtype == "float32":
        decoded = np.frombuffer(decode_page(used, bytes(encoded), PAGE_BYTES, numbers), np.float32)
        assert np.allclose(decoded, np.frombuffer(page, np.float32), atol=0.15)


def test_every_codec_has_a_name_to_measure():
    asked = [dataclasses.replace(ASKED, codec=name) for name in CODEC_NAMES]
    assert [parse_measure_request(encode_measure_request(each)) for each in asked] == asked


async def test_bounds_are_checked_before_anything_is_made():
    measurements = Measurements("float32")
    with pytest.raises(BadRequest):
        measurements.open(dataclasses.replace(ASKED, page_bytes=PAGE_BYTES + 1))
    assert measurements.transfer(ASKED.transfer_id) is None
    assert not measurements.cancel(ASKED.transfer_id)
