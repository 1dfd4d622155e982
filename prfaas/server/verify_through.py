"""Shows that a running server answers as this node alone would: same bodies, here and there, compared.

What is compared is what clients get: each choice of a whole answer, with its text, the tokens' names
and the log-probabilities of drawn and most likely tokens in all their digits. Every body is sent twice
under one fresh salt: without any cache, then where caches may hit.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Literal

import aiohttp

from prfaas.clock import Clock, monotonic_s, wall_s
from prfaas.config.options import NodeConfig
from prfaas.errors import ConfigError, TransferError
from prfaas.server.answering import Answer, Job
from prfaas.server.jobs import Arrival, JobMaker
from prfaas.server.merging import MergedGenerations
from prfaas.server.node import Progress
from prfaas.server.openai.answers import Json, Piece
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.server.verify import (
    NUM_TOKENS,
    SAMPLING,
    SEED,
    NoMetrics,
    SamplingName,
    lengths_to_try,
    verify_tokens,
)

NUM_LOGPROBS = 5
ThroughRow = Literal["cold", "cached"]
THROUGH_ROWS: tuple[ThroughRow, ...] = ("cold", "cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughCase:
    """One answer of the server beside the local one."""

    prompt_tokens: int
    sampling: SamplingName
    row: ThroughRow
    route: str
    reason: str
    node: str | None
    """Which node decoded; None if the server is one node."""
    tokens_reused: int
    tokens_remote: int
    bytes_received: int
    exact: bool
    is_equal: bool
    """Text, token names, log-probabilities and the reason of the end."""
    difference: str | None
    """The first thing that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughReport:
    """All cases of one run."""

    url: str
    cases: tuple[ThroughCase, ...]

    @property
    def has_passed(self) -> bool:
        """Every answer was the local one."""
        return bool(self.cases) and all(case.is_equal for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "url": self.url,
            "has_passed": self.has_passed,
            "cases": [asdict(case) for case in self.cases],
        }


ThroughCaseDone = Callable[[ThroughCase, int, int], None]
"""Called after each case with it, the number done and the number in all."""


async def run_verify_through(
    config: NodeConfig,
    url: str,
    *,
    progress: Progress,
    api_key: str | None = None,
    on_case: ThroughCaseDone | None = None,
    more_lengths: Sequence[int] = (),
) -> ThroughReport:
    """Load the model that `config` names, without a peer, and compare it with the server at `url`.

    Raises ConfigError for a model that cannot be loaded or a length that does not fit, TransferError
    for a server that is not there or answers anything but an answer.
    """
    node = await asyncio.to_thread(load_pd_node, config, NoMetrics(), progress)
    lengths = lengths_to_try(node.layout, node.max_context_tokens, more_lengths)
    cases: list[ThroughCase] | None = None
    failure: TransferError | ConfigError | None = None
    async with asyncio.TaskGroup() as tasks:
        await node.start(tasks)
        try:
            async with Server(url, api_key) as server:
                comparison = _Comparison(node, server, await server.model_name(), on_case)
                cases = await comparison.run(lengths)
        except (TransferError, ConfigError) as error:
            failure = error  # raised below: the group would wrap it
        finally:
            await node.close()
    if failure is not None:
        raise failure
    assert cases is not None
    return ThroughReport(url=url, cases=tuple(cases))


class Server:
    """A running server's API; every failure is a TransferError."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._session = aiohttp.ClientSession(
            headers=None if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
        )
        self._url = url.rstrip("/")

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model_name(self) -> str:
        """Return what the server calls its model."""
        listed = await self._ask("GET", "/v1/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise TransferError(f"{self._url} lists no model") from error

    async def complete(self, body: bytes) -> dict[str, Any]:
        """Return the whole answer to a body of /v1/completions."""
        return await self._ask("POST", "/v1/completions", body)

    async def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers=headers
            ) as answer:
                data = await answer.read()
        except aiohttp.ClientError as error:
            raise TransferError(f"{self._url}: {error}") from error
        if answer.status != HTTPStatus.OK:
            raise TransferError(
                f"{self._url}: {answer.status} {data[:500].decode(errors='replace')}"
            )
        try:
            parsed = json.loads(data)
        except ValueError as error:
            raise TransferError(f"{self._url}: no JSON came") from error
        if not isinstance(parsed, dict):
            raise TransferError(f"{self._url}: no JSON object came")
        return parsed


class _Comparison:
    """Compares one prompt after the other; its greedy and its seeded answers run side by side."""

    def __init__(
        self, node: PdNode, server: Server, model_name: str, on_case: ThroughCaseDone | None
    ) -> None:
        self._node = node
        self._server = server
        self._model_name = model_name
        self._on_case = on_case
        self._clock: Clock = monotonic_s
        self._jobs = JobMaker(node=node, model_name=model_name, draw_seed=lambda: SEED, wall=wall_s)
        self._cases: list[ThroughCase] = []
        self._num_cases = 0

    async def run(self, lengths: Sequence[int]) -> list[ThroughCase]:
        self._num_cases = len(lengths) * len(SAMPLING) * len(THROUGH_ROWS)
        tokens = verify_tokens(self._node.tokenizer.encode, max(lengths))
        for length in lengths:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for name in SAMPLING:
                        tasks.create_task(self._compare(tokens[:length], name))
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
        return self._cases

    async def _compare(self, tokens: tuple[int, ...], sampling: SamplingName) -> None:
        body = self._body(tokens, sampling)
        expected = await self._answer_here(body)
        for row in THROUGH_ROWS:
            got = await self._server.complete(body)
            case = compare_answers(expected, got, len(tokens), sampling, row)
            self._cases.append(case)
            if self._on_case is not None:
                self._on_case(case, len(self._cases), self._num_cases)

    def _body(self, tokens: tuple[int, ...], sampling: SamplingName) -> bytes:
        return json.dumps(
            {
                "model": self._model_name,
                "prompt": tokens,
                "max_tokens": NUM_TOKENS,
                "temperature": SAMPLING[sampling].temperature,
                "seed": SEED,
                "logprobs": NUM_LOGPROBS,
                "cache_salt": secrets.token_hex(16),
            }
        ).encode()

    async def _answer_here(self, body: bytes) -> list[Json]:
        """Return the choices that this node gives, prefilled here, as a client would get them."""
        arrival = Arrival(
            request_id=f"verify-{secrets.token_hex(8)}", arrival_s=self._clock(), api_key=None
        )
        job = self._jobs.completion(body, arrival)
        choices = [
            job.head.choice(index, Piece.joined(pieces), has_logprobs=job.has_logprobs)
            for index, pieces in enumerate(await self._pieces(job))
        ]
        parsed: list[Json] = json.loads(json.dumps(choices))
        return parsed

    async def _pieces(self, job: Job) -> list[list[Piece]]:
        merged = MergedGenerations(len(job.requests))
        answer = Answer(job, self._node, merged)
        pieces: list[list[Piece]] = [[] for _ in answer.choices]
        for index, request in enumerate(job.requests):
            async with self._node.generate(request, force_route="local") as generation:
                merged.generations[index] = generation
                async for event in generation:
                    step = answer.push(index, event)
                    if step is not None:
                        pieces[step.index].append(step.piece)
        return pieces


def compare_answers(
    expected: Sequence[Json],
    got: dict[str, Any],
    num_tokens: int,
    sampling: SamplingName,
    row: ThroughRow,
) -> ThroughCase:
    """Return the case of an answer whose choices should be the `expected` ones."""
    try:
        story = got["usage"]["prfaas"]
        difference = _first_difference(expected, got["choices"], "choices")
        return ThroughCase(
            prompt_tokens=num_tokens,
            sampling=sampling,
            row=row,
            route=str(story["route"]),
            reason=str(story["reason"]),
            node=story.get("node"),
            tokens_reused=int(story["tokens_reused"]),
            tokens_remote=int(story["tokens_remote"]),
            bytes_received=int(story["bytes_received"]),
            exact=bool(story["exact"]),
            is_equal=difference is None,
            difference=difference,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"the server's answer lacks {error}: is it prfaas?") from error


def _first_difference(expected: Any, got: Any, where: str) -> str | None:
    """Return where two JSON values differ first, with both; None if they are equal."""
    if isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        pairs = ((f"{where}.{key}", expected[key], got[key]) for key in expected)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = ((f"{where}[{i}]", *both) for i, both in enumerate(zip(expected, got, strict=True)))
    elif type(expected) is type(got) and expected == got:
        return None
    else:
        return f"{where}: {str(expected)[:80]!r} here, {str(got)[:80]!r} there"
    return next(filter(None, (_first_difference(a, b, at) for at, a, b in pairs)), None)
