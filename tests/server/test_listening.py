import socket
import struct
import sys

import pytest
from aiohttp import web

from prfaas.config.options import HttpOptions
from prfaas.errors import ConfigError
from prfaas.server.listening import BACKLOG, Listener, bind_socket


@pytest.mark.parametrize("port", [70_000, -1, 65_536])
def test_a_port_out_of_range_is_told_with_its_limit(port):
    with pytest.raises(ConfigError, match=f"{port}, must be from 0 to 65535"):
        bind_socket("127.0.0.1", port)


def test_a_port_can_be_bound_once_only():
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}"):
                bind_socket(host, port)
    bind_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.256.256.256", "a" * 300, ""])
def test_a_host_that_is_none_is_told(host):
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind_socket(host, 0)


def test_an_address_of_another_machine_is_told():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind_socket("192.0.2.1", 0)


def test_ipv6_is_an_address_like_another():
    with bind_socket("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
async def test_as_many_connections_as_the_system_lets_wait_for_a_busy_node():
    with open("/proc/sys/net/core/somaxconn") as setting:  # noqa: ASYNC230, PTH123 - memory, not a disk
        most = int(setting.read())
    with bind_socket("127.0.0.1", 0) as listening:
        async with Listener(listening, HttpOptions()) as listener:
            await listener.show(web.Application())
            info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (limit,) = struct.unpack_from("I", info, 28)  # of a listening socket this field is its limit
    assert limit == min(BACKLOG, most)
