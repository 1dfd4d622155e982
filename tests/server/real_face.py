"""Real nodes over tiny models behind their HTTP face."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from prfaas.config.options import NodeConfig
from prfaas.server.app import Face
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.listening import Listener, bind_socket
from prfaas.server.metrics import Metrics
from prfaas.server.node import NodeFactory  # noqa: TC001
from prfaas.server.pd import load_pd_node
from prfaas.server.prefill import load_prefill_node
from tests.server.http_face import HttpFace
from tests.server.real_nodes import no_progress


@asynccontextmanager
async def node_running(config: NodeConfig) -> AsyncIterator[HttpFace]:
    """A loaded node behind its HTTP face."""
    metrics, lifecycle = Metrics(), Lifecycle()
    load: NodeFactory = load_pd_node if config.role == "pd" else load_prefill_node
    node = await asyncio.to_thread(load, config, metrics, no_progress)
    listening = bind_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        with Face(config, lifecycle, metrics) as face:
            async with Listener(listening, config.http) as listener:
                await node.start(tasks)
                await listener.show(face.node_app(node))
                face.start_serving(node)
                try:
                    yield HttpFace(
                        node=node,  # type: ignore[arg-type]  # tests use what both kinds have
                        lifecycle=lifecycle,
                        metrics=metrics,
                        face=face,
                        session=session,
                        port=port,
                    )
                finally:
                    await node.close()


def holds_nothing(face: HttpFace) -> bool:
    load = face.node.load()
    return not (load.num_running or load.num_waiting or load.pages["referenced"])
