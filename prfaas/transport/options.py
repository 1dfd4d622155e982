"""How a node reaches its peer and how long it waits."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options of the `[transport]` section."""

    peer: str | None = None
    """host:port of the prefill node, or of several, separated by commas; pd role only."""
    connect_timeout_s: float = 2.0
    stall_timeout_s: float = 2.0
    """No verified byte for this long: the rest is prefilled locally."""
    lease_s: float = 10.0
    """A transfer that makes no progress for this long is dropped by its sender."""
    max_transfers: int = 16
    """Transfers one prefill node holds at once; more are refused as overloaded."""
    accept_numerics: Literal["equal", "approximate"] = "equal"
    """approximate: take KV from a peer with other numerics; answers say exact: false."""
    allow_plaintext: bool = False
    """The KV channel may leave loopback without encryption."""
    cluster_key_file: str | None = None
    """A secret that both ends must prove to have; None asks for none."""
    tls_cert: str | None = None
    """PEM chain that this node shows; a prefill node then speaks nothing but TLS."""
    tls_key: str | None = None
    tls_ca: str | None = None
    """PEM of who may have signed the other side's certificate: a pd node then reaches its peer by TLS,
    a prefill node demands a certificate of every asker."""
    kv_codec: Literal["raw", "zstd", "auto", "fp16", "int8", "fp8", "auto-lossy"] = "raw"
    """How pages may be encoded on the wire; a pd node asks for it. The first three are lossless."""
    streams: int = 4
    """Connections over which one transfer comes; a pd node keeps as many open to its peer."""
    tcp_congestion: str | None = None
    """Congestion control of the streams' connections; None leaves the system's."""
    egress_limit_bytes_per_s: float | None = None
    """A prefill node sends KV no faster, over all transfers."""
    transfer_snapshot_tokens: str = "auto"
    """Windows and states are sent at the multiples of so many tokens, too; 0: only at the prompt's end. auto:
    as often as adds a tenth to the bytes of full attention."""
    kv_channel: Literal["stream", "http"] = "stream"
    """stream: raw connections, or HTTP by itself where an upgrade does not get through; http: always HTTP."""
