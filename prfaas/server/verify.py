"""Shows that a peer's prefill gives this node's own bits: same prompts, here and there, compared.

Every prompt is answered three times with logits: here without any cache, by the peer with the caches
of both sides bypassed (a fresh salt), and by the peer again under the same salt, so that both caches
hit wherever a hit is possible. A row that the peer did not really answer is a failure: the second
must have computed the whole prompt remotely; the third must have come over the wire, and must have
reused something if the prompt is longer than a block.

With a lossy codec differences are what is asked for, and there is a fourth answer: here again, from
what was received. The peer computes its logits before anything is lost; only these show the loss.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from prfaas.cache.spec import CacheLayout, WindowSpec
from prfaas.clock import Clock, monotonic_s
from prfaas.config.options import NodeConfig
from prfaas.errors import ConfigError, PrfaasError, TransferError
from prfaas.server.node import Progress
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.server.transfer_metrics import Direction
from prfaas.transport.coding import may_lose
from prfaas.transport.messages import CodecName
from prfaas.types import Request, RequestRecord, RouteName, SamplingParams

NUM_TOKENS = 32
LONG_TOKENS = 4133
"""Several thousand, and no multiple of anything."""
SEED = 20_260_415

SamplingName = Literal["greedy", "seeded"]
RowName = Literal["remote", "remote_cached", "local_cached"]
ROWS: tuple[RowName, ...] = ("remote", "remote_cached")
LOSSY_ROWS: tuple[RowName, ...] = (*ROWS, "local_cached")
SAMPLING: dict[SamplingName, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, seed=SEED, temperature=0.0),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, seed=SEED, temperature=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCase:
    """An answer from the peer's KV beside the local one."""

    prompt_tokens: int
    sampling: SamplingName
    row: RowName
    route: RouteName
    reason: str
    tokens_reused: int
    tokens_remote: int
    bytes_received: int
    exact: bool
    """What the answer says of itself."""
    answer_tokens: int
    """Of the local answer."""
    agreeing_tokens: int
    """Tokens before the first that differs."""
    tokens_equal: bool
    bits_equal: bool
    """The first logits agree in every bit."""
    max_logit_difference: float | None
    """None if the peer sent no logits, or others than numbers."""
    failure: str | None
    """Why this row proves nothing, whatever it compares to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All cases of one run."""

    peer: str
    codec: CodecName
    cases: tuple[VerifyCase, ...]

    @property
    def has_passed(self) -> bool:
        """All is equal; with a lossy codec, what the peer says before anything is lost, its logits."""
        if not may_lose(self.codec):
            return self.tokens_equal and self.bits_equal
        return all(
            case.failure is None and (case.bits_equal or case.row == "local_cached")
            for case in self.cases
        )

    @property
    def exact(self) -> bool:
        """Every answer said that it was."""
        return all(case.exact for case in self.cases)

    @property
    def max_logit_difference(self) -> float | None:
        """The largest of all rows; None if no row had one."""
        found = [case.max_logit_difference for case in self.cases]
        return max((value for value in found if value is not None), default=None)

    @property
    def greedy_agreement(self) -> float:
        """The fraction of greedy tokens before the first of their answer that differs."""
        greedy = [case for case in self.cases if case.sampling == "greedy"]
        num_tokens = sum(case.answer_tokens for case in greedy)
        return sum(case.agreeing_tokens for case in greedy) / num_tokens if num_tokens else 0.0

    @property
    def tokens_equal(self) -> bool:
        """Every row is remote and drew the local tokens."""
        return all(case.tokens_equal and case.failure is None for case in self.cases)

    @property
    def bits_equal(self) -> bool:
        """Every row is remote and had the local logits to the bit."""
        return all(case.bits_equal and case.failure is None for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "peer": self.peer,
            "codec": self.codec,
            "exact": self.exact,
            "cases": [asdict(case) for case in self.cases],
            "tokens_equal": self.tokens_equal,
            "bits_equal": self.bits_equal,
            "max_logit_difference": self.max_logit_difference,
            "greedy_agreement": self.greedy_agreement,
        }


CaseDone = Callable[[VerifyCase, int, int], None]
"""Called after each case with it, the number done and the number in all."""


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: tuple[int, ...]
    logits: bytes | None
    record: RequestRecord


class NoMetrics:
    """Verification counts nothing."""

    def transfer_bytes(self, direction: Direction, num_bytes: int) -> None:
        """Ignore bytes."""

    def transfer_finished(self, direction: Direction, outcome: str) -> None:
        """Ignore ends."""


async def run_verify(
    config: NodeConfig,
    *,
    progress: Progress,
    on_case: CaseDone | None = None,
    more_lengths: Sequence[int] = (),
) -> VerifyReport:
    """Load the pd node that `config` describes, without HTTP, and compare it with its peer.

    Raises ConfigError for a model that cannot be loaded or does not take a prompt of
    `more_lengths`, TransferError for a peer that is not there, not ready or not compatible.
    """
    node = await asyncio.to_thread(load_pd_node, config, NoMetrics(), progress)
    result: VerifyReport | PrfaasError
    async with asyncio.TaskGroup() as tasks:
        await node.start(tasks)
        try:
            result = await verify_node(
                node, clock=monotonic_s, on_case=on_case, more_lengths=more_lengths
            )
        except PrfaasError as error:
            result = error  # raised below: the group would wrap it
        finally:
            await node.close()
    if isinstance(result, PrfaasError):
        raise result
    return result


async def verify_node(
    node: PdNode,
    *,
    clock: Clock,
    on_case: CaseDone | None = None,
    more_lengths: Sequence[int] = (),
) -> VerifyReport:
    """Compare a started pd node with its peer, with prompts of `more_lengths` beside the usual.

    Raises ConfigError for a length that the node's context does not take, TransferError for a peer
    that cannot be used.
    """
    peer = node.peer
    if peer is None:
        raise TransferError("no peer to verify")
    await peer.settled()
    if peer.state != "up":
        raise TransferError(f"peer {peer.name} is {peer.state}: {peer.detail}")
    lengths = lengths_to_try(node.layout, node.max_context_tokens, more_lengths)
    tokens = verify_tokens(node.tokenizer.encode, max(lengths))
    rows = LOSSY_ROWS if may_lose(node.kv_codec) else ROWS
    run = _Run(node, clock, on_case, rows, num_cases=len(lengths) * len(SAMPLING) * len(rows))
    for length in lengths:
        await run.compare(tokens[:length])
    return VerifyReport(peer=peer.name, codec=node.kv_codec, cases=tuple(run.cases))


def lengths_to_try(
    layout: CacheLayout, max_context_tokens: int, more_lengths: Sequence[int]
) -> list[int]:
    """Return the usual lengths and `more_lengths`, in order.

    Raises ConfigError for one that the context does not take.
    """
    limit = max_context_tokens - NUM_TOKENS
    for length in more_lengths:
        if not 0 < length <= limit:
            raise ConfigError(
                f"a prompt of {length} tokens and an answer of {NUM_TOKENS} do not fit the context "
                f"of {max_context_tokens}"
            )
    return sorted({*prompt_lengths(layout, max_context_tokens), *more_lengths})


def prompt_lengths(layout: CacheLayout, max_context_tokens: int) -> list[int]:
    """Return the lengths to try: around a block, beyond every window, and long; each fits."""
    block = layout.block_tokens
    lengths = {1, block - 1, block, block + 1, 3 * block + 5, LONG_TOKENS}
    for spec in layout.groups:
        if isinstance(spec, WindowSpec):
            lengths.add(spec.window_tokens + block + 7)
    limit = max_context_tokens - NUM_TOKENS - 1
    return sorted({min(length, limit) for length in lengths if length > 0 and limit > 0})


def verify_tokens(encode: Callable[..., list[int]], num_tokens: int) -> tuple[int, ...]:
    """Return the first tokens of a text that does not repeat itself."""
    num_sentences = 16
    while True:
        text = " ".join(
            f"Entry {index}: the {index * index % 97} ships of harbour {index % 13} carry grain."
            for index in range(num_sentences)
        )
        tokens = encode(text, add_bos=True)
        if len(tokens) >= num_tokens:
            return tuple(tokens[:num_tokens])
        num_sentences *= 2


class _Run:
    """Compares one prompt after the other; its greedy and its seeded answers run side by side."""

    def __init__(
        self,
        node: PdNode,
        clock: Clock,
        on_case: CaseDone | None,
        rows: Sequence[RowName],
        *,
        num_cases: int,
    ) -> None:
        self.cases: list[VerifyCase] = []
        self._node = node
        self._clock = clock
        self._on_case = on_case
        self._rows = rows
        self._num_cases = num_cases

    async def compare(self, tokens: tuple[int, ...]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in SAMPLING:
                    tasks.create_task(self._compare_rows(tokens, name))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _compare_rows(self, tokens: tuple[int, ...], sampling: SamplingName) -> None:
        local = await self._ask(tokens, sampling, "local", secrets.token_bytes(16))
        salt = secrets.token_bytes(16)
        for row in self._rows:
            route: RouteName = "local" if row == "local_cached" else "remote"
            remote = await self._ask(tokens, sampling, route, salt)
            case = _compare(local, remote, sampling, row, self._node.layout.block_tokens)
            self.cases.append(case)
            if self._on_case is not None:
                self._on_case(case, len(self.cases), self._num_cases)

    async def _ask(
        self, tokens: tuple[int, ...], sampling: SamplingName, route: RouteName, salt: bytes
    ) -> _Answer:
        request = Request(
            request_id=f"verify-{secrets.token_hex(8)}",
            prompt_tokens=tokens,
            sampling=SAMPLING[sampling],
            cache_salt=salt,
            arrival_s=self._clock(),
        )
        async with self._node.generate(
            request, force_route=route, return_logits=True
        ) as generation:
            drawn = [event.token_id async for event in generation]
        return _Answer(tuple(drawn), generation.first_logits, generation.record)


def _compare(
    local: _Answer, remote: _Answer, sampling: SamplingName, row: RowName, block_tokens: int
) -> VerifyCase:
    record = remote.record
    return VerifyCase(
        prompt_tokens=record.prompt_tokens,
        sampling=sampling,
        row=row,
        route=record.route,
        reason=record.reason,
        tokens_reused=record.tokens_reused,
        tokens_remote=record.tokens_remote,
        bytes_received=record.bytes_received,
        exact=record.exact,
        answer_tokens=len(local.tokens),
        agreeing_tokens=_num_agreeing(local.tokens, remote.tokens),
        tokens_equal=local.tokens == remote.tokens,
        bits_equal=local.logits is not None and local.logits == remote.logits,
        max_logit_difference=_max_difference(local.logits, remote.logits),
        failure=_failure(record, row, block_tokens),
    )


def _num_agreeing(local: Sequence[int], remote: Sequence[int]) -> int:
    differing = (i for i, (a, b) in enumerate(zip(local, remote, strict=False)) if a != b)
    return next(differing, min(len(local), len(remote)))


def _failure(record: RequestRecord, row: RowName, block_tokens: int) -> str | None:
    if record.route != ("local" if row == "local_cached" else "remote"):
        return f"answered {record.route}: {record.reason}"
    if row != "local_cached" and record.bytes_received == 0:
        return "nothing came from the peer"
    if row == "remote":
        if record.tokens_remote != record.prompt_tokens:
            return f"the peer computed {record.tokens_remote} of {record.prompt_tokens} tokens"
    elif record.prompt_tokens > block_tokens and record.tokens_reused == 0:
        return "no cache was hit"
    return None


def _max_difference(local: bytes | None, remote: bytes | None) -> float | None:
    if local is None or remote is None or len(local) != len(remote):
        return None
    ours, theirs = (np.frombuffer(data, "<f4").astype(np.float64) for data in (local, remote))
    difference = float(np.max(np.abs(ours - theirs)))
    return difference if np.isfinite(difference) else None
