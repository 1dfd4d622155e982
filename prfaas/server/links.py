"""What the kernel says of the connections to each node at the other end, sampled now and then."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from prfaas.clock import Clock
from prfaas.transport.link_state import LinkState, LinkView
from prfaas.transport.ports import StreamPort
from prfaas.transport.tcpinfo import TcpInfo, read_tcp_info

SAMPLE_S = 1.0
MAX_LINKS = 32
"""Nodes at the other end that are told apart; each is a label of metrics."""

OpenPorts = Callable[[], Iterable[tuple[str, StreamPort]]]
"""Returns the connections that are open, each with the name of the node at its other end."""


class Links:
    """The links of one node; `views` are as of the last sample."""

    def __init__(
        self, open_ports: OpenPorts, *, clock: Clock, egress_limit_bytes_per_s: float | None = None
    ) -> None:
        self._open_ports = open_ports
        self._clock = clock
        self._limit = egress_limit_bytes_per_s
        self._states: dict[str, LinkState] = {}

    @property
    def views(self) -> Mapping[str, LinkView]:
        """Return each link by the name of its other end."""
        return {name: state.view() for name, state in self._states.items()}

    async def run(self, on_sample: Callable[[], None] = lambda: None) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            on_sample()
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> None:
        """Take one sample of every connection; a link without any is forgotten."""
        samples: dict[str, dict[object, TcpInfo]] = {}
        for name, port in self._open_ports():
            if name in samples or len(samples) < MAX_LINKS:
                info = _info(port)
                if info is not None:
                    samples.setdefault(name, {})[port] = info
        self._states = {name: self._states.get(name) or LinkState(self._limit) for name in samples}
        for name, infos in samples.items():
            self._states[name].add(infos, now_s=self._clock())


def _info(port: StreamPort) -> TcpInfo | None:
    try:
        return read_tcp_info(port.sock)
    except OSError:  # closed meanwhile, or an HTTP client's
        return None
