"""A pd node's view of one of its peers, kept fresh by handshakes in the background.

The router holds what they find; here is the loop, and one log line a state change, never one a
request.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Literal

from prfaas.clock import Clock
from prfaas.errors import IncompatiblePeer, Overloaded, TransferError, UntrustedPeer
from prfaas.log import get_logger
from prfaas.scheduler.router import Router
from prfaas.scheduler.view import PeerView
from prfaas.server.links import Links
from prfaas.transport.address import PeerAddress
from prfaas.transport.client import PeerClient
from prfaas.transport.handshake import Identity, check_compatible
from prfaas.transport.messages import PeerStatus, TransferRequest
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity

PeerState = Literal["unknown", "up", "down", "not_ready", "incompatible", "untrusted"]

REFRESH_S = 2.0
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 5.0


class Peer:
    """One node to exchange KV with: who it is, and whether prefills may go there."""

    def __init__(
        self,
        address: PeerAddress,
        *,
        options: TransportOptions,
        identity: Identity,
        router: Router,
        clock: Clock,
        security: ChannelSecurity | None = None,
    ) -> None:
        self.name = str(address)
        self.client = PeerClient(address, options, security=security, clock=clock)
        self.state: PeerState = "unknown"
        self.detail = "no handshake yet"
        self.is_exact = True
        """Its numerics are ours; False only with accept_numerics approximate. Whether ours are exact at all is
        another matter."""
        self.numerics_fingerprint = identity.numerics_fingerprint
        """Of the last handshake that fitted; ours before it."""
        self.links = Links(
            lambda: ((self.name, port) for port in self.client.open_ports()), clock=clock
        )
        self.num_users = 0
        """Whatever is under way between us that must not lose its connections."""
        self.num_transfers = 0
        """Of these, KV on its way from there, or waiting to be."""
        self.num_kv_bytes = 0
        """Of KV that has come from there, whoever asked for it."""
        self._identity = identity
        self._accept_approximate = options.accept_numerics == "approximate"
        self._router = router
        self._clock = clock
        self._doubted = asyncio.Event()
        self._settled = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """A long prompt could be sent there now."""
        return self._router.is_usable(self.name, self._clock())

    @property
    def view(self) -> PeerView:
        """What is known of it now, as the router sees it."""
        return self._router.peer(self.name)

    @property
    def is_there(self) -> bool:
        """It answers and its KV is of use here, whether or not it takes prompts."""
        return self.state in ("up", "not_ready")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it from being left for the length of the block."""
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1

    @contextlib.contextmanager
    def transferring(self) -> Iterator[None]:
        """Count a transfer from it, which uses it, for the length of the block."""
        self.num_transfers += 1
        try:
            with self.in_use():
                yield
        finally:
            self.num_transfers -= 1

    def doubt(self) -> None:
        """Shake hands at once: a transfer found something wrong."""
        self._doubted.set()

    async def settled(self) -> None:
        """Return once the first handshake has succeeded or failed."""
        await self._settled.wait()

    async def acknowledge(self, asked: TransferRequest) -> None:
        """Tell it by HTTP that everything of a transfer is verified, as far as it can be reached."""
        with self.in_use():
            try:
                await self.client.acknowledge(asked)
            except (TransferError, Overloaded) as error:
                # All is here and verified; the sender's lease lets its pages go.
                get_logger().debug(
                    "transfer.ack_lost", transfer_id=asked.transfer_id, error=str(error)
                )

    async def cancel(self, transfer_id: str) -> None:
        """Tell it to drop a transfer, as far as it can be reached."""
        with self.in_use():
            try:
                await self.client.cancel(transfer_id)
            except TransferError as error:
                # Its lease ends the transfer there.
                get_logger().debug(
                    "transfer.cancel_lost", transfer_id=transfer_id, error=str(error)
                )

    async def run(self) -> None:
        """Shake hands and keep streams open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.client.run())
            tasks.create_task(self.links.run(self._tell_router))
            tasks.create_task(self._keep_shaking_hands())

    async def _keep_shaking_hands(self) -> None:
        """Often while the peer fails, now and then while it works."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._shake_hands()
            self._settled.set()
            if self.state == "up":
                backoff_s, pause_s = FIRST_BACKOFF_S, REFRESH_S
            else:
                backoff_s, pause_s = min(2 * backoff_s, MAX_BACKOFF_S), backoff_s
            self._doubted.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._doubted.wait()
            except TimeoutError:
                continue

    def _tell_router(self) -> None:
        view = self.links.views.get(self.name)
        if view is not None:
            self._router.measured(
                self.name, rtt_s=view.rtt_s, goodput_bytes_per_s=view.goodput_bytes_per_s
            )

    async def close(self) -> None:
        """Close the connections to the peer."""
        await self.client.close()

    async def _shake_hands(self) -> None:
        try:
            status = await self.client.handshake(self._identity)
            is_exact = check_compatible(
                self._identity, status.identity, accept_approximate=self._accept_approximate
            )
        except IncompatiblePeer as error:
            self._router.incompatible(self.name, now_s=self._clock())
            self._enter("incompatible", str(error))
        except UntrustedPeer as error:
            self._router.unreachable(self.name, now_s=self._clock())
            self._enter("untrusted", str(error))
        except (TransferError, Overloaded) as error:
            self._router.unreachable(self.name, now_s=self._clock())
            self._enter("down", str(error))
        else:
            self._meet(status, is_exact=is_exact)

    def _meet(self, status: PeerStatus, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.numerics_fingerprint = status.identity.numerics_fingerprint
        self._router.heard(
            self.name,
            now_s=self._clock(),
            is_ready=status.is_ready,
            num_queue_tokens=status.num_waiting_tokens,
            prefill_tokens_per_s=status.prefill_tokens_per_s,
            egress_limit_bytes_per_s=status.egress_limit_bytes_per_s,
        )
        self._enter("up" if status.is_ready else "not_ready", status.reason)
        self.client.heard()

    def _enter(self, state: PeerState, detail: str) -> None:
        if state != self.state:
            log = get_logger()
            if state == "up":
                log.info("peer.up", peer=self.name, is_exact=self.is_exact)
            elif state == "not_ready":  # its own word: it loads, drains, or decodes alone
                log.info("peer.not_ready", peer=self.name, detail=detail)
            else:
                log.warning("peer.lost", peer=self.name, state=state, detail=detail)
        self.state, self.detail = state, detail
