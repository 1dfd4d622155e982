"""/health, /ready and /metrics: the same in every role and at every time of a node's life."""

from aiohttp import web

from prfaas.server.lifecycle import Lifecycle
from prfaas.server.metrics import CONTENT_TYPE, Metrics
from prfaas.server.openai.answers import to_json


class Probes:
    """What orchestrators and Prometheus ask; none of it is logged."""

    def __init__(self, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._lifecycle = lifecycle
        self._metrics = metrics

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the three routes."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """Answer 200: the process is alive and its loop runs; a restart would not help more."""
        return web.Response(body=to_json({"status": "alive"}), content_type="application/json")

    async def ready(self, _request: web.Request) -> web.Response:
        """Answer 200 if requests are let in, else 503 and why not."""
        is_ready, reason = self._lifecycle.readiness()
        body = {"status": "ready"} if is_ready else {"status": "not_ready", "reason": reason}
        return web.Response(
            body=to_json({**body}),
            content_type="application/json",
            status=200 if is_ready else 503,
            headers={} if is_ready else {"Retry-After": "1"},
        )

    async def metrics(self, _request: web.Request) -> web.Response:
        """Answer all metrics in Prometheus' text format."""
        self._metrics.set_ready(self._lifecycle.readiness()[0])
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
