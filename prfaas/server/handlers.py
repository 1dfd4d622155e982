"""The routes of the roles that serve the API: completions, models, the cluster, and the stories of requests."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from aiohttp import web

from prfaas.clock import Clock
from prfaas.config.options import HttpOptions
from prfaas.errors import BadRequest
from prfaas.server.answering import Answerer, Job
from prfaas.server.body import parse_object, read_body
from prfaas.server.cluster_body import cluster_body
from prfaas.server.explaining import explanation_body
from prfaas.server.jobs import Arrival, JobMaker, LongJob, check_model
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.middleware import API_KEY, REQUEST_ID
from prfaas.server.node import ServingNode
from prfaas.server.openai.answers import model_body, record_body, to_json
from prfaas.server.openai.fields import shown
from prfaas.server.records import RecordRing
from prfaas.types import RouteName

NUM_LISTED_RECORDS = 50
INLINE_BYTES = 1 << 11
"""A longer body is parsed beside the loop; this one in less than a thread takes to wake."""
INLINE_CHARS = 1 << 11
"""A longer text is tokenised beside the loop."""

MakeJob = Callable[[bytes, Arrival, int | None], Job]
"""`JobMaker`'s methods."""


class Handlers:
    """The handlers of the pd and the scheduler role; each returns a whole answer or one already streamed."""

    def __init__(
        self,
        *,
        node: ServingNode,
        jobs: JobMaker,
        answerer: Answerer,
        records: RecordRing,
        lifecycle: Lifecycle,
        options: HttpOptions,
        executor: Executor,
        clock: Clock,
        model_name: str,
        created_s: int,
    ) -> None:
        self._node = node
        self._jobs = jobs
        self._answerer = answerer
        self._records = records
        self._lifecycle = lifecycle
        self._options = options
        self._executor = executor
        self._clock = clock
        self._model_name = model_name
        self._created_s = created_s

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return all routes of the role."""
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/v1/cluster", self.cluster),
            web.get("/debug/route", self.debug_route),
            web.post("/debug/route", self.debug_route),
            web.get("/debug/requests", self.debug_requests),
            web.get("/debug/requests/{request_id}", self.debug_request),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._complete(request, self._jobs.chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._complete(request, self._jobs.completion)

    async def _complete(self, request: web.Request, make_job: MakeJob) -> web.StreamResponse:
        with self._lifecycle.admit():
            arrival = Arrival(
                request_id=request[REQUEST_ID],
                arrival_s=self._clock(),
                api_key=request.get(API_KEY),
            )
            body = await read_body(
                request,
                max_bytes=self._options.max_body_bytes,
                timeout_s=self._options.read_timeout_s,
            )
            job = await self._job(make_job, body, arrival)
            del body  # may be megabytes, and the answer takes long
            return await self._answerer.answer(request, job)

    async def _job(self, make_job: MakeJob, body: bytes, arrival: Arrival) -> Job:
        """Return the job of a body, made at once or, where that would hold up others, in a thread."""
        if len(body) <= INLINE_BYTES:
            with contextlib.suppress(LongJob):
                return make_job(body, arrival, INLINE_CHARS)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, make_job, body, arrival, None)

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        models = [model_body(self._model_name, self._created_s)]
        return _json({"object": "list", "data": models})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        check_model(request.match_info["model"], self._model_name)
        return _json(model_body(self._model_name, self._created_s))

    async def cluster(self, _request: web.Request) -> web.Response:
        """GET /v1/cluster: this node and its peers, or all nodes of a fleet."""
        return _json(cluster_body(self._node.role, self._node.load(), self._clock()))

    async def debug_route(self, request: web.Request) -> web.Response:
        """GET or POST /debug/route: where a prompt would go now, and why; nothing runs.

        The prompt is the body of a completion or a chat, or `prompt` or `tokens` in the query.
        """
        arrival = Arrival(
            request_id=request[REQUEST_ID],
            arrival_s=self._clock(),
            api_key=request.get(API_KEY),
        )
        body = _asked_in(request.query, self._model_name)
        if body is None and not request.can_read_body:
            raise BadRequest(
                "neither prompt nor tokens in the query, nor a completion or a chat as the body",
                param="prompt",
            )
        if body is None:
            body = await read_body(
                request,
                max_bytes=self._options.max_body_bytes,
                timeout_s=self._options.read_timeout_s,
            )
        force_route = _forced_route(request.query)
        loop = asyncio.get_running_loop()
        job = await loop.run_in_executor(self._executor, self._job_of, body, arrival)
        if len(job.requests) != 1:
            raise BadRequest("prompt: one is explained at a time", param="prompt")
        asked = job.requests[0]
        explained = await self._node.explain(asked, force_route)
        return _json(explanation_body(explained, len(asked.prompt_tokens)))

    def _job_of(self, body: bytes, arrival: Arrival) -> Job:
        is_chat = "messages" in parse_object(body)
        return self._jobs.chat(body, arrival) if is_chat else self._jobs.completion(body, arrival)

    async def debug_requests(self, _request: web.Request) -> web.Response:
        """GET /debug/requests: the latest stories."""
        latest = self._records.latest(NUM_LISTED_RECORDS)
        return _json({"object": "list", "data": [record_body(record) for record in latest]})

    async def debug_request(self, request: web.Request) -> web.Response:
        """GET /debug/requests/{request_id}: by x-request-id or by the answer's id."""
        request_id = request.match_info["request_id"]
        bare_id = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        record = self._records.get(bare_id)
        if record is None:
            raise BadRequest(
                f"no request {shown(request_id)} is known; only the latest are kept",
                param="request_id",
                code="request_not_found",
                status=404,
            )
        return _json(record_body(record))


def _asked_in(query: Mapping[str, str], model_name: str) -> bytes | None:
    """Return the completion that a query stands for, None if it names no prompt."""
    if "prompt" in query:
        return to_json({"model": model_name, "prompt": query["prompt"]})
    if "tokens" not in query:
        return None
    tokens = query["tokens"].split(",")
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in tokens):
        raise BadRequest("tokens: token ids, with commas between them", param="tokens")
    return to_json({"model": model_name, "prompt": [int(token) for token in tokens]})


def _forced_route(query: Mapping[str, str]) -> RouteName | None:
    match query.get("route"):
        case None:
            return None
        case "local":
            return "local"
        case "remote":
            return "remote"
        case other:
            raise BadRequest(f"route: local or remote, not {shown(other)}", param="route")


def _json(body: dict[str, object]) -> web.Response:
    return web.Response(body=to_json(body), content_type="application/json")
