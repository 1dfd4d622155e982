"""Serves the KV channel of one node: transfers to its peers, with the node's own engine and cache.

`open` reserves pages for everything that a transfer must hold and queues the prompt; pages of the
prefix hit go out at once, the others layer by layer as the engine writes them; the first tokens
overtake them; END follows the last page; the pages stay until the receiver's ACK. Whatever ends a
transfer early, the prompt is aborted within a step and every page let go. A transfer of what is cached
alone needs no engine: its pages are here, and END follows them at once.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.clock import Clock
from prfaas.engine.submission import Submission
from prfaas.errors import BadRequest, EngineError, Overloaded
from prfaas.log import get_logger
from prfaas.server.engine_thread import EngineThread
from prfaas.server.links import Links
from prfaas.server.places import bytes_of_places, places_of_prefix, places_of_snapshots
from prfaas.server.prefill_job import JobsProgress, PrefillJob, PrefixJob
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.transport.auth import PeerSide
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.flow import EgressBudget
from prfaas.transport.gate import Gate
from prfaas.transport.handshake import Identity, check_compatible
from prfaas.transport.link_state import LinkView
from prfaas.transport.measure_routes import MeasureRoutes
from prfaas.transport.measuring import Measurements
from prfaas.transport.messages import PeerStatus, TransferAccepted, TransferRequest
from prfaas.transport.options import TransportOptions
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.server import KvChannel

EGRESS_BURST_BYTES = 1 << 20
MAX_CANCELLED = 1024
MAX_TRANSFER_ID_CHARS = 32

_Run = Callable[[], Coroutine[Any, Any, None]]


class PrefillService:
    """What a node does for its peers; the TransferService behind its routes.

    `refusal` says why it takes no prompts now, None while it does; what is cached it sends even then,
    unless it drains. Engine and finder are the node's, which starts and ends them.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        cache: PrefixCache,
        engine: EngineThread,
        finder: PrefixFinder,
        options: TransportOptions,
        vocab_size: int,
        max_context_tokens: int,
        metrics: TransferMetrics,
        clock: Clock,
        cluster_key: ClusterKey | None = None,
        expected_tokens_per_s: float = 0.0,
        refusal: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._expected_tokens_per_s = expected_tokens_per_s
        self._refusal = refusal
        self._identity = identity
        self._cache = cache
        self._engine = engine
        self._finder = finder
        self._options = options
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._metrics = metrics
        self._clock = clock
        self._progress = JobsProgress()
        self._transfers: dict[str, OutgoingTransfer | None] = {}
        """None while its prompt is being looked up."""
        self._cancelled: dict[str, None] = {}
        """The latest ids that were cancelled before their transfer began, oldest first."""
        self._budget = EgressBudget(options.egress_limit_bytes_per_s, EGRESS_BURST_BYTES)
        self._channel = KvChannel(
            self,
            gate=None
            if cluster_key is None
            else PeerSide(cluster_key, identity=identity, epoch=secrets.token_hex(32)),
            budget=self._budget,
            congestion=options.tcp_congestion,
        )
        self._measurements = Measurements(identity.kv_dtype, on_ended=self._budget.done)
        self._links = Links(
            self._channel.open_ports,
            clock=clock,
            egress_limit_bytes_per_s=options.egress_limit_bytes_per_s,
        )
        self._sampling: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._is_draining = False

    # ------------------------------------------------------------ its life

    @property
    def is_ready(self) -> tuple[bool, str]:
        """(False, why) while prompts cannot be computed or are not taken."""
        if self._is_draining:
            return False, "draining"
        refusal = self._refusal()
        return self._engine.is_ready if refusal is None else (False, refusal)

    @property
    def num_transfers(self) -> int:
        """Transfers that have been opened and have not ended."""
        return len(self._transfers)

    @property
    def links(self) -> Mapping[str, LinkView]:
        """The links to those who asked, by their hosts."""
        return self._links.views

    @property
    def gate(self) -> Gate:
        """Who may use the node's routes that only its fleet may use."""
        return self._channel.gate

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the KV channel."""
        measuring = MeasureRoutes(self._channel, self._measurements)
        return [*self._channel.routes(), *measuring.routes()]

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Let transfers run, in `tasks`."""
        self._tasks = tasks
        self._sampling = tasks.create_task(self._links.run())

    def drain(self) -> None:
        """Take nothing new; running transfers go on."""
        self._is_draining = True

    async def close(self) -> None:
        """End all transfers. Idempotent."""
        self._is_draining = True
        for transfer in self._transfers.values():
            if transfer is not None:
                transfer.close("stopped")
        self._measurements.close()
        if self._sampling is not None:
            self._sampling.cancel()
        self._channel.close()
        if self._running:
            await asyncio.wait(self._running)

    # ------------------------------------------------------------ what the routes ask

    def status(self) -> PeerStatus:
        """Return who this node is and how busy."""
        is_ready, reason = self.is_ready
        load = self._engine.load()
        return PeerStatus(
            identity=self._identity,
            is_ready=is_ready,
            reason=reason,
            num_waiting_tokens=load.num_waiting_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s or self._expected_tokens_per_s,
            egress_limit_bytes_per_s=self._options.egress_limit_bytes_per_s,
        )

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        """Return a transfer that streams can be attached to, or None."""
        transfer = self._transfers.get(transfer_id)
        return self._measurements.transfer(transfer_id) if transfer is None else transfer

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer, even one that is only being opened; False if unknown.

        An unknown one is remembered: its `open` may be on its way over another connection, and
        whoever sent it has left.
        """
        if self._measurements.cancel(transfer_id):
            return True
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.close("cancelled")
        elif len(transfer_id) <= MAX_TRANSFER_ID_CHARS:
            self._cancelled[transfer_id] = None
            if len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
        return transfer_id in self._transfers

    def count_sent(self, num_bytes: int) -> None:
        """Count page bytes that went out."""
        self._metrics.transfer_bytes("sent", num_bytes)

    async def open(self, asked: TransferRequest) -> TransferAccepted:
        """Reserve pages for all of it and queue the prompt, or hold what is cached; see TransferService."""
        self._check(asked)
        transfer_id = asked.transfer_id
        self._transfers[transfer_id] = None
        try:
            if asked.cached_only:
                table = await self._find_cached(asked)
                self._transfers[transfer_id] = self._start_prefix(asked, table)
            else:
                table = await self._reserve(asked)
                self._transfers[transfer_id] = self._start_prefill(asked, table)
        finally:
            if self._transfers[transfer_id] is None:
                del self._transfers[transfer_id]
            self._cancelled.pop(transfer_id, None)
        return TransferAccepted(hit_tokens=table.hit_tokens)

    def _check(self, asked: TransferRequest) -> None:
        check_compatible(
            self._identity, asked.identity, accept_approximate=asked.accept_approximate
        )
        is_ready, reason = self.is_ready
        if not is_ready and (self._is_draining or not asked.cached_only):
            raise Overloaded(reason)
        if len(self._transfers) >= self._options.max_transfers:
            raise Overloaded(f"{len(self._transfers)} transfers in flight, limit is as many")
        if asked.transfer_id in self._cancelled:
            raise Overloaded("cancelled")
        if asked.transfer_id in self._transfers:
            raise BadRequest(f"transfer {asked.transfer_id} exists")
        prompt = asked.request.prompt_tokens
        if asked.have_tokens % self._identity.block_tokens:
            raise BadRequest(f"have_tokens = {asked.have_tokens} is not a whole number of blocks")
        if asked.snapshot_tokens % self._identity.block_tokens:
            raise BadRequest(f"snapshot_tokens = {asked.snapshot_tokens} is no multiple of a block")
        # Room for a token behind the first, or our limit would end an answer that its own lets go on.
        most_tokens = self._max_context_tokens - (0 if asked.cached_only else 2)
        if len(prompt) > most_tokens:
            raise BadRequest(f"{len(prompt)} prompt tokens, limit {most_tokens}")
        if max(prompt) >= self._vocab_size:
            raise BadRequest(f"token id {max(prompt)}, vocabulary of {self._vocab_size}")
        if not asked.cached_only:
            self._check_credit(asked)

    def _check_credit(self, asked: TransferRequest) -> None:
        """Raise BadRequest where pages that will be sent would never fit."""
        layout, num_tokens = self._cache.layout, len(asked.request.prompt_tokens)
        snapshots = places_of_snapshots(
            layout, num_tokens, asked.have_tokens, asked.snapshot_tokens
        )
        num_bytes = layout.bytes_needed(num_tokens, asked.have_tokens)
        num_bytes += bytes_of_places(layout, snapshots)
        if asked.credit_bytes < num_bytes:
            raise BadRequest(f"a credit of {asked.credit_bytes} bytes for {num_bytes} bytes of KV")

    async def _find_cached(self, asked: TransferRequest) -> BlockTable:
        """Return a table of what is cached, or raise BadRequest if that is nothing that the asker lacks."""
        request, layout = asked.request, self._cache.layout
        table = await self._finder.find(request.prompt_tokens, request.cache_salt)
        places = places_of_prefix(layout, table.hit_tokens, asked.have_tokens)
        num_bytes = bytes_of_places(layout, places)
        refusal: BadRequest | Overloaded | None = None
        if asked.transfer_id in self._cancelled:
            refusal = Overloaded("cancelled")
        elif table.hit_tokens <= asked.have_tokens:
            refusal = BadRequest(
                f"{table.hit_tokens} tokens are cached here, {asked.have_tokens} there"
            )
        elif asked.credit_bytes < num_bytes:
            refusal = BadRequest(f"a credit of {asked.credit_bytes} bytes for {num_bytes} of KV")
        if refusal is not None:
            table.release()
            raise refusal
        return table

    async def _reserve(self, asked: TransferRequest) -> BlockTable:
        request = asked.request
        num_tokens = len(request.prompt_tokens)
        num_pages = self._cache.layout.pages_needed(num_tokens)
        if num_pages > self._cache.pool.num_pages:
            raise BadRequest(
                f"{num_tokens} prompt tokens need {num_pages} pages, the pool has "
                f"{self._cache.pool.num_pages}"
            )
        table = await self._finder.find(request.prompt_tokens, request.cache_salt)
        if asked.transfer_id in self._cancelled:
            table.release()
            raise Overloaded("cancelled")
        if not table.try_reserve(num_tokens):
            table.release()
            raise Overloaded(f"no free pages for a prompt of {num_tokens} tokens")
        return table

    def _start_prefix(self, asked: TransferRequest, table: BlockTable) -> OutgoingTransfer:
        """Send what the table holds; its one hold is the job's."""
        job = PrefixJob(asked=asked, table=table, layout=self._cache.layout)
        lease_s = self._options.lease_s
        self._start(job.transfer, lambda: job.run(lease_s=lease_s))
        return job.transfer

    def _start_prefill(self, asked: TransferRequest, table: BlockTable) -> OutgoingTransfer:
        """Queue the prompt; the engine and the job each take a hold on the table."""
        job = PrefillJob(
            asked=asked,
            table=table,
            layout=self._cache.layout,
            clock=self._clock,
            all_jobs=self._progress,
        )
        table.retain()
        try:
            stream = self._engine.submit(
                Submission(
                    request=replace(asked.request, request_id=asked.transfer_id),
                    table=table,
                    sink=job,
                    prefill_only=True,
                    return_logits=asked.want_logits,
                    snapshot_tokens=asked.snapshot_tokens,
                )
            )
        except EngineError as error:
            table.release()
            raise Overloaded(str(error)) from error
        lease_s = self._options.lease_s
        self._start(job.transfer, lambda: job.run(stream, self._engine, lease_s=lease_s))
        return job.transfer

    def _start(self, transfer: OutgoingTransfer, run: _Run) -> None:
        assert self._tasks is not None, "open before start"
        task = self._tasks.create_task(self._run(transfer, run))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, transfer: OutgoingTransfer, run: _Run) -> None:
        try:
            await run()
        finally:
            del self._transfers[transfer.transfer_id]
            self._budget.done(transfer.transfer_id)
            outcome = transfer.outcome or "stopped"
            self._metrics.transfer_finished("sent", outcome)
            get_logger().info(
                "transfer.sent",
                transfer_id=transfer.transfer_id,
                outcome=outcome,
                num_pages=transfer.num_pages_sent,
                num_bytes=transfer.num_page_bytes_sent,
            )
