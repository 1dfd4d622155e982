"""A fleet of replayed nodes behind a scheduler answers as one node would, whatever happens to its nodes."""

import asyncio
import contextlib
from typing import Any

import pytest

from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.options import SchedulerOptions
from prfaas.types import Request, SamplingParams
from tests.server.fleet import until
from tests.server.fleet_hosts import FleetHosts, Hosted, fleet_hosts, pd_node, story_of

pytestmark = pytest.mark.slow

SHORT, LONG = 100, 1200


def prompt(num_tokens: int, variant: int = 0) -> list[int]:
    return [(index * 7 + variant * 131 + 3) % 251 for index in range(num_tokens)]


def said_by(hosts: FleetHosts, hosted: Hosted) -> Heartbeat:
    member = hosts.member(hosted)
    assert member is not None
    return member.heartbeat


def link_rate(hosts: FleetHosts, asker: Hosted, sender: Hosted) -> float | None:
    report = said_by(hosts, asker).links.get(sender.name)
    return None if report is None else report.bytes_per_s


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "cluster.key"
    path.write_bytes(b"a secret of the cluster")
    path.chmod(0o600)
    return path


async def test_a_fleet_answers_as_one_node_does_and_uses_what_its_nodes_have(key_file):
    options = SchedulerOptions(threshold_tokens=500)
    async with fleet_hosts(key_file=key_file, scheduler=options) as hosts:
        alone = hosts.nodes[0]
        for variant, (num_tokens, route) in enumerate(((SHORT, "local"), (LONG, "remote"))):
            asked = prompt(num_tokens, variant)
            answer = await hosts.complete(asked, logprobs=2, n=2)
            story = story_of(answer)
            assert story["route"] == route
            assert story["node"] in {hosted.name for hosted in hosts.nodes[:2]}
            if route == "remote":
                assert story["peer"] == hosts.nodes[2].name
            direct = await hosts.complete(asked, port=alone.port, logprobs=2, n=2)
            assert answer["choices"] == direct["choices"]
        # What a node has computed draws the same prompt there, at once.
        again = story_of(await hosts.complete(prompt(LONG, 1)))
        assert again["tokens_reused"] > LONG - 128
        assert again["node_reason"] in ("prefix", "spilled", "least_loaded", "only")


async def test_an_answer_goes_on_when_its_node_is_cut_off_after_some_tokens(key_file):
    async with fleet_hosts(key_file=key_file, num_prefill=0) as hosts:
        asked = prompt(SHORT)
        whole = await hosts.complete(asked, max_tokens=20, n=2)
        hosts.death.after_tokens = 5
        text = ["", ""]
        usage: dict[str, Any] = {}
        async for event in hosts.stream(asked, max_tokens=20, n=2):
            for choice in event["choices"]:
                text[choice["index"]] += choice["text"]
            usage = event["usage"] or usage
        (dead,) = (hosted for hosted in hosts.nodes if hosted.is_dead)
        assert text == [choice["text"] for choice in whole["choices"]]
        assert usage["completion_tokens"] == 40
        assert (usage["prfaas"]["retries"], usage["prfaas"]["node"] != dead.name) == (1, True)
        # The other one goes on alone.
        story = story_of(await hosts.complete(prompt(SHORT, 3)))
        assert story["node"] == usage["prfaas"]["node"]


async def test_a_client_that_leaves_ends_the_work_at_the_node():
    async with fleet_hosts(num_prefill=0, speed=1.0) as hosts:
        async with contextlib.aclosing(hosts.stream(prompt(SHORT), max_tokens=100_000)) as events:
            async for event in events:
                if event["choices"]:
                    break
        await until(lambda: not any(pd_node(h).load().num_running for h in hosts.nodes))
        await until(lambda: hosts.scheduler.load().num_running == 0)


async def test_nodes_of_one_mode_work_together():
    async with fleet_hosts(modes=("prefill", "decode"), num_prefill=0) as hosts:
        answer = await hosts.complete(prompt(LONG))
        story = story_of(answer)
        assert story["node"] == hosts.nodes[1].name
        assert (story["route"], story["peer"]) == ("remote", hosts.nodes[0].name)
        direct = await hosts.complete(prompt(LONG), port=hosts.nodes[1].port)
        assert answer["choices"] == direct["choices"]


async def test_a_node_that_drains_gets_nothing_new_and_finishes_what_it_has():
    async with fleet_hosts(num_prefill=0, speed=20.0) as hosts:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(hosts.complete(prompt(SHORT), max_tokens=200))
            await until(lambda: any(pd_node(h).load().num_running for h in hosts.nodes))
            (draining,) = (h for h in hosts.nodes if pd_node(h).load().num_running)
            pd_node(draining).drain()

            def is_draining() -> bool:
                member = hosts.member(draining)
                return member is not None and member.state == "draining"

            await until(is_draining)
            for variant in range(3):
                story = story_of(await hosts.complete(prompt(SHORT, variant + 1)))
                assert story["node"] != draining.name
        assert story_of(running.result())["node"] == draining.name


def asking(tokens: list[int]) -> Request:
    return Request(
        request_id="asking",
        prompt_tokens=tuple(tokens),
        sampling=SamplingParams(max_tokens=1, seed=0),
    )


async def holders(hosts: FleetHosts, tokens: list[int]) -> set[str]:
    """Return the nodes that have some of a prompt, as far as they have said."""
    driver = hosts.scheduler.driver
    return set(await driver.hits(await driver.keys(asking(tokens))))


async def prefill_far_away(hosts: FleetHosts, hosted: Hosted, tokens: list[int]) -> None:
    """Let a node have a prompt prefilled by its peer, which then has it, too."""
    async with pd_node(hosted).generate(asking(tokens), force_route="remote") as generation:
        async for _ in generation:
            pass
    assert generation.record.route == "remote"


@pytest.mark.parametrize(
    ("egress_limit", "is_fetched"),
    [(125_000_000, True), (800_000, False)],
    ids=["plentiful", "scarce"],
)
async def test_a_prefix_of_another_cluster_is_fetched_where_bandwidth_is_plentiful(
    egress_limit, is_fetched
):
    """What was prefilled far away for east begins a prompt that west would prefill itself."""
    options = SchedulerOptions(threshold_tokens=500)
    async with fleet_hosts(
        clusters=("east", "west"), egress_limit=egress_limit, speed=2.0, scheduler=options
    ) as hosts:
        east, west, far = hosts.nodes
        await until(lambda: link_rate(hosts, east, far) is not None)
        await prefill_far_away(hosts, east, prompt(456))
        pd_node(east).drain()
        await until(lambda: said_by(hosts, east).is_draining)
        await hosts.complete(prompt(300, 9), max_tokens=1)
        while far.name not in await holders(hosts, prompt(460)):  # noqa: ASYNC110  # until it says so
            await asyncio.sleep(0.01)
        await until(lambda: said_by(hosts, west).prefill_tokens_per_s is not None)
        assert link_rate(hosts, west, far) == pytest.approx(egress_limit)
        answer = await hosts.complete(prompt(460))
        story = await hosts.get(f"/debug/requests/{answer['id']}")
        (told,) = story["tries"]
        assert (story["node"], story["route"]) == (west.name, "local")
        assert told["prefix_from"] == (far.name if is_fetched else None)
        assert story["tokens_reused"] == (448 if is_fetched else 0)
