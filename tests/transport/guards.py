"""The ways to guard a channel: none, the cluster key, certificates."""

from typing import Any

from prfaas.transport.auth import PeerSide
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity, asker_security, peer_security
from tests.transport.certificates import Certificates
from tests.transport.samples import IDENTITY

KEY = ClusterKey(b"k" * 16)


def guarded(guard: str, files: Certificates) -> dict[str, Any]:
    """Return what `channel` needs for a guard: open, key or tls."""
    if guard == "key":
        gate = PeerSide(KEY, identity=IDENTITY, epoch="e" * 64)
        return {"gate": gate, "asker": ChannelSecurity(cluster_key=KEY)}
    if guard == "tls":
        cert, key = files.issue("peer", "127.0.0.1")
        peer = peer_security(TransportOptions(tls_cert=cert, tls_key=key)).tls
        ours = asker_security(TransportOptions(tls_ca=files.authority)).tls
        return {"tls": peer, "asker": ChannelSecurity(tls=ours)}
    return {}
