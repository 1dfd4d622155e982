"""The routes of the pd role: completions, models, and the stories of requests."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from aiohttp import web

from prfaas.clock import Clock
from prfaas.config.options import HttpOptions
from prfaas.errors import BadRequest
from prfaas.server.answering import Answerer, Job
from prfaas.server.body import read_body
from prfaas.server.jobs import Arrival, JobMaker, check_model
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.middleware import API_KEY, REQUEST_ID
from prfaas.server.openai.answers import model_body, record_body, to_json
from prfaas.server.openai.fields import shown
from prfaas.server.records import RecordRing

NUM_LISTED_RECORDS = 50


class Handlers:
    """The pd role's handlers; each returns a whole answer or one already streamed."""

    def __init__(
        self,
        *,
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
            web.get("/debug/requests", self.debug_requests),
            web.get("/debug/requests/{request_id}", self.debug_request),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._complete(request, self._jobs.chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._complete(request, self._jobs.completion)

    async def _complete(
        self, request: web.Request, make_job: Callable[[bytes, Arrival], Job]
    ) -> web.StreamResponse:
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
            loop = asyncio.get_running_loop()
            job = await loop.run_in_executor(self._executor, make_job, body, arrival)
            del body  # may be megabytes, and the answer takes long
            return await self._answerer.answer(request, job)

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        models = [model_body(self._model_name, self._created_s)]
        return _json({"object": "list", "data": models})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        check_model(request.match_info["model"], self._model_name)
        return _json(model_body(self._model_name, self._created_s))

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


def _json(body: dict[str, object]) -> web.Response:
    return web.Response(body=to_json(body), content_type="application/json")
