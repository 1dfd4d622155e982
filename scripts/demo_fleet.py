"""What `scripts/demo --fleet` shows: a scheduler and four nodes that route, fail over and convert, in the terminal.

The engines replay published profiles, ten times as fast: time, pages and the protocol are real, tokens are hashes.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.demo_nodes import (
    ENDING,
    HOST,
    DemoError,
    NodeProcess,
    check_free,
    logs_kept_on_failure,
    notes,
    results,
    served_model,
    start,
    wait_ready,
)

PROFILES = Path(__file__).parents[1] / "configs" / "profiles"
SPEED, BYTES_SCALE = 10.0, 0.001
SHORT_TOKENS, LONG_TOKENS = 300, 24_000
HEARTBEAT_S = 1.0
STEP_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 90.0
SECONDS = ("--rebalance-period-s", "1", "--rebalance-dwell-s", "3", "--rebalance-prompts", "200")
"""The long time scale, minutes by default, within a demo's patience."""


@dataclass(kw_only=True)
class Fleet:
    """All processes of the demo."""

    scheduler: NodeProcess
    nodes: dict[str, NodeProcess]
    """By their names in the fleet."""
    start: Callable[[str], NodeProcess]
    """Starts the node of that name."""

    def kill(self, name: str) -> None:
        """Kill a node as a machine that loses its power would."""
        self.nodes[name].process.kill()

    def restart(self, name: str) -> None:
        """Start a killed node again."""
        self.nodes[name] = self.start(name)


@dataclass(kw_only=True)
class Answer:
    """What came of one prompt."""

    text: str = ""
    node: str = ""
    """Where decoding began."""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def story(self) -> dict[str, Any]:
        """How it was prefilled and where decoding ended."""
        story: dict[str, Any] = self.usage.get("prfaas", {})
        return story


def run_fleet(options: argparse.Namespace) -> None:
    """Start a fleet, show what it does, and serve on unless told `--once`."""
    with fleet(options.port) as running:
        wait_ready((*running.nodes.values(), running.scheduler), needs_peers=False)
        facts = asyncio.run(show_all(running))
        if options.json:
            print(json.dumps(facts), flush=True)
        if not options.once:
            results.print(f"\nServing on {running.scheduler.url} until Ctrl-C.")
            while True:
                running.scheduler.check_running()
                ENDING.wait(1)


@contextmanager
def fleet(port: int) -> Iterator[Fleet]:
    """Run a scheduler on `port`, and behind it three pd nodes and a prefill node on the next ports."""
    for offset in range(5):
        check_free(port + offset, "--port")
    joined = ("--scheduler", f"{HOST}:{port}")
    local, remote = (replayed(name) for name in ("h20-internal-1t", "h200-internal-1t"))
    plans = {
        port + 1: ("pd 1", ("--role", "pd", "--cluster", "local", "--mode", "decode", *local)),
        port + 2: ("pd 2", ("--role", "pd", "--cluster", "local", "--mode", "decode", *local)),
        port + 3: ("pd 3", ("--role", "pd", "--cluster", "local", "--mode", "prefill", *local)),
        port + 4: ("prefill", ("--role", "prefill", "--cluster", "remote", *remote)),
    }
    with logs_kept_on_failure() as logs, ExitStack() as running:
        scheduler = start(
            running, "scheduler", port, logs, ("--role", "scheduler", *local[:4], *SECONDS)
        )

        def start_node(name: str) -> NodeProcess:
            node_port = int(name.rpartition(":")[2])
            title, flags = plans[node_port]
            return start(running, title, node_port, logs, (*flags, *joined))

        names = [f"{HOST}:{node_port}" for node_port in plans]
        yield Fleet(
            scheduler=scheduler,
            nodes={name: start_node(name) for name in names},
            start=start_node,
        )


def replayed(profile: str) -> tuple[str, ...]:
    """Return the flags of an engine that replays a profile."""
    return (
        *("--engine", "replay", "--profile", str(PROFILES / f"{profile}.toml")),
        *("--speed", str(SPEED), "--bytes-scale", str(BYTES_SCALE)),
    )


async def show_all(running: Fleet) -> dict[str, Any]:
    """Show one thing after the other; return the facts."""
    async with aiohttp.ClientSession(running.scheduler.url) as session:
        client = Client(session, served_model(running.scheduler))
        await client.until_joined(len(running.nodes))
        await client.show_nodes("the fleet")
        return {
            "routing": await show_routing(client),
            "failover": await show_failover(client, running),
            "converting": await show_converting(client),
        }


class Client:
    """Sends prompts of token ids to the scheduler, and looks at its fleet."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model

    async def answer(self, prompt: Sequence[int], *, max_tokens: int) -> Answer:
        """Return the whole answer to a prompt."""
        answer = Answer()
        async for _ in self.deltas(answer, prompt, max_tokens=max_tokens):
            pass
        return answer

    async def deltas(
        self, answer: Answer, prompt: Sequence[int], *, max_tokens: int
    ) -> AsyncIterator[str]:
        """Yield an answer's text as it comes; it and its story are put into `answer`."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "seed": 7,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise DemoError(f"{response.status}: {(await response.text())[:300]}")
            answer.node = response.headers.get("X-Prfaas-Node", "")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise DemoError(f"the answer broke: {event['error']['message']}")
                answer.usage = event.get("usage") or answer.usage
                for choice in event["choices"]:
                    answer.text += choice["text"]
                    yield choice["text"]

    async def nodes(self) -> list[dict[str, Any]]:
        """Return what the scheduler knows of its nodes."""
        async with self._session.get("/v1/cluster") as response:
            nodes: dict[str, dict[str, Any]] = (await response.json())["nodes"]
            return [{"node": name, **node} for name, node in nodes.items()]

    async def until_joined(self, num_nodes: int) -> None:
        """Return once so many nodes are ready in the scheduler's eyes."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while True:
                if sum(node["state"] == "ready" for node in await self.nodes()) >= num_nodes:
                    return
                await asyncio.sleep(0.2)

    async def show_nodes(self, title: str) -> None:
        """Print a table of the nodes."""
        table = Table(title=title, title_justify="left")
        columns = ("node", "role", "cluster", "mode", "state")
        for column in columns:
            table.add_column(column)
        for node in await self.nodes():
            table.add_row(*(str(node[column]) for column in columns))
        results.print(table)


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Return token ids that begin like no other number's."""
    return [100 + number % 100, *(30 + (7 * i + number) % 60 for i in range(num_tokens - 1))]


def lines(title: str, rows: dict[str, str]) -> None:
    """Print labelled lines in a frame."""
    table = Table.grid(padding=(0, 2))
    for label, value in rows.items():
        table.add_row(Text(label, style="dim"), Text(value))
    results.print(Panel(table, title=title, title_align="left"))


async def show_routing(client: Client) -> dict[str, Any]:
    """Eight short prompts at once, a long one, and the long one's prefix again."""
    async with asyncio.TaskGroup() as tasks:
        short = [
            tasks.create_task(client.answer(prompt_of(i, SHORT_TOKENS), max_tokens=40))
            for i in range(8)
        ]
    spread = Counter(task.result().node for task in short)
    long_prompt = prompt_of(50, LONG_TOKENS)
    long = await client.answer(long_prompt, max_tokens=8)
    await asyncio.sleep(2 * HEARTBEAT_S)  # nodes tell what they cache with their heartbeats
    again = await client.answer([*long_prompt, *prompt_of(51, 200)], max_tokens=8)
    lines(
        "routing",
        {
            "8 short prompts": ", ".join(
                f"{count} at {node}" for node, count in sorted(spread.items())
            ),
            f"{LONG_TOKENS:,} tokens": how(long),
            "the same and more": how(again),
        },
    )
    return {
        "spread": dict(sorted(spread.items())),
        "long": long.story,
        "again": again.story,
    }


def how(answer: Answer) -> str:
    """Return in words how a prompt was prefilled."""
    story = answer.story
    return (
        f"{story['route']} ({story['reason']}), decoded by {story['node']}: {story['tokens_reused']:,} tokens"
        f" reused, {story['tokens_remote']:,} computed remotely, {story['tokens_local']:,} there;"
        f" first token after {story['ttft_s']:.2f} s"
    )


async def show_failover(client: Client, running: Fleet) -> dict[str, Any]:
    """The same prompt twice; the second time its node is killed after some tokens."""
    prompt = prompt_of(60, SHORT_TOKENS)
    undisturbed = await client.answer(prompt, max_tokens=400)
    answer, num_deltas = Answer(), 0
    async for _ in client.deltas(answer, prompt, max_tokens=400):
        num_deltas += 1
        if num_deltas == 40:
            running.kill(answer.node)
            notes.print(f"[dim]kill -9 of {answer.node}, 40 tokens into its answer")
    is_equal = answer.text == undisturbed.text
    lines(
        "failing over",
        {
            "killed": f"{answer.node}, in the middle of an answer",
            "went on at": f"{answer.story['node']} after {answer.story['retries']} retry",
            "text": "the same, to the last character" if is_equal else "ANOTHER TEXT",
        },
    )
    if not is_equal:
        raise DemoError("the answer that failed over is another one")
    await client.show_nodes("the fleet now")
    running.restart(answer.node)
    await client.until_joined(len(running.nodes))
    notes.print(f"[dim]{answer.node} is back")
    return {"killed": answer.node, "node": answer.story["node"], "is_equal": is_equal}


async def show_converting(client: Client) -> dict[str, Any]:
    """Many prompts with short answers: a node that decodes is needed for prefill, and becomes one that prefills."""
    before = {node["node"]: node["mode"] for node in await client.nodes()}
    converted: dict[str, str] = {}
    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(_load(client))
        while not converted and time.perf_counter() - begun_s < LOAD_TIMEOUT_S:
            await asyncio.sleep(0.25)
            for node in await client.nodes():
                if node["mode"] != before.get(node["node"], node["mode"]):
                    converted[node["node"]] = node["mode"]
        load.cancel()
    took_s = time.perf_counter() - begun_s
    if not converted:
        raise DemoError(f"no node was converted within {LOAD_TIMEOUT_S:.0f} s")
    lines(
        "converting",
        {
            name: f"{before[name]} → {mode}, after {took_s:.0f} s"
            for name, mode in converted.items()
        },
    )
    await client.show_nodes("the fleet now")
    return {"converted": converted, "before": before}


async def _load(client: Client) -> None:
    """Send short prompts with short answers, some each second, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        number = 0
        while True:
            number += 1
            prompt = prompt_of(100 + number, SHORT_TOKENS + number % 50)
            tasks.create_task(client.answer(prompt, max_tokens=16))
            await asyncio.sleep(0.15)
