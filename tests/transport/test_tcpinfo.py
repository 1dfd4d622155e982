"""The kernel's account of a socket is read right, and what we tell it arrives."""

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from prfaas.errors import ConfigError
from prfaas.transport.tcpinfo import (
    available_congestion,
    check_congestion,
    parse_tcp_info,
    read_tcp_info,
    set_congestion,
    set_pacing_rate,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux keeps tcp_info")
NUM_BYTES = 300_000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def pass_bytes(near: socket.socket, far: socket.socket, num_bytes: int) -> None:
    near.sendall(bytes(num_bytes))
    while num_bytes:
        num_bytes -= len(far.recv(num_bytes))


@linux
def test_a_loopback_sockets_counts_are_those_of_what_was_sent(pair):
    near, far = pair
    for _ in range(20):
        pass_bytes(near, far, NUM_BYTES // 20)
    sent, received = read_tcp_info(near), read_tcp_info(far)
    assert sent is not None
    assert received is not None
    assert sent.bytes_sent - sent.bytes_retrans == NUM_BYTES
    assert received.bytes_received == NUM_BYTES
    assert sent.bytes_received == received.bytes_sent == 0
    assert 0 < sent.rtt_s < 1
    assert sent.min_rtt_s is not None
    assert 0 < sent.min_rtt_s < 1
    assert sent.mss_bytes == near.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    assert sent.cwnd_bytes >= sent.mss_bytes
    assert sent.delivery_rate_bytes_per_s > 0
    assert sent.reordering_segments >= 3  # the kernel's default, and it only grows


@linux
def test_bytes_that_wait_in_the_send_buffer_are_seen(pair):
    near, _ = pair
    near.setblocking(False)
    num_taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_taken += near.send(bytes(1 << 20))
    info = read_tcp_info(near)
    assert info is not None
    assert 0 < info.notsent_bytes < num_taken


@linux
def test_a_socket_that_is_no_tcp_or_is_closed_has_no_info():
    with socket.socket(socket.AF_UNIX) as other:
        assert read_tcp_info(other) is None
    assert read_tcp_info(other) is None


def test_other_platforms_have_no_info_and_set_nothing(pair, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert read_tcp_info(pair[0]) is None
    assert not set_pacing_rate(pair[0], 1e6)
    with pytest.raises(ConfigError, match="only Linux"):
        set_congestion(pair[0], "cubic")


def test_each_field_is_read_from_its_offset_in_the_kernels_struct():
    offsets = {  # from <linux/tcp.h>
        "num_retransmits": (100, "I", 7),
        "reordering_segments": (88, "I", 5),
        "notsent_bytes": (144, "I", 11),
        "bytes_acked": (120, "Q", 1 << 40),
        "bytes_received": (128, "Q", 1 << 41),
        "bytes_sent": (200, "Q", 1 << 42),
        "bytes_retrans": (208, "Q", 1 << 43),
        "num_reordered": (220, "I", 3),
    }
    raw = bytearray(256)
    for offset, code, value in offsets.values():
        struct.pack_into("=" + code, raw, offset, value)
    for offset, value in ((8, 4), (16, 100), (24, 6), (68, 1), (72, 2), (80, 10), (148, 9)):
        struct.pack_into("=I", raw, offset, value)
    struct.pack_into("=Q", raw, 104, (1 << 64) - 1)
    struct.pack_into("=Q", raw, 160, 12_345)
    raw[7] = 1
    info = parse_tcp_info(bytes(raw))
    assert info is not None
    for name, (_, _, value) in offsets.items():
        assert getattr(info, name) == value, name
    assert (info.rto_s, info.rtt_s, info.rtt_var_s, info.min_rtt_s) == (4e-6, 1e-6, 2e-6, 9e-6)
    assert (info.mss_bytes, info.cwnd_bytes, info.unacked_bytes) == (100, 1_000, 600)
    assert info.delivery_rate_bytes_per_s == 12_345
    assert info.is_app_limited
    assert info.pacing_rate_bytes_per_s is None


def test_an_old_kernels_shorter_struct_is_no_info():
    assert parse_tcp_info(bytes(104)) is None


def test_a_round_trip_that_was_never_measured_is_none():
    raw = bytearray(256)
    struct.pack_into("=I", raw, 148, 0xFFFFFFFF)
    info = parse_tcp_info(bytes(raw))
    assert info is not None
    assert info.min_rtt_s is None


@linux
def test_the_kernel_takes_a_pacing_rate_and_gives_it_up_again(pair):
    near, _ = pair
    for rate, expected in ((1e6, 1_000_000), (6e9, 6_000_000_000), (None, (1 << 64) - 1)):
        assert set_pacing_rate(near, rate)
        (told,) = struct.unpack("=Q", near.getsockopt(socket.SOL_SOCKET, 47, 8))
        assert told == expected


@linux
def test_a_named_congestion_control_is_the_sockets(pair):
    near, _ = pair
    set_congestion(near, "reno")  # always there, and open to everybody
    assert near.getsockopt(socket.IPPROTO_TCP, 13, 16).rstrip(b"\0") == b"reno"


@linux
def test_an_unknown_congestion_control_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no congestion control 'warp'; available: ") as caught:
        check_congestion("warp")
    assert available_congestion()
    for name in available_congestion():
        assert name in str(caught.value)


@linux
@pytest.mark.parametrize("name", ["", "ünlikely", "a" * 100])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ConfigError, match="congestion control"):
        check_congestion(name)
