"""Where a prompt would go can be asked without running it, and a cluster can be looked at."""

import json
from typing import Any

import pytest
import structlog

from prfaas.cache.hashing import block_keys
from prfaas.scheduler.decision import Route
from prfaas.scheduler.explaining import Candidate, Explanation
from prfaas.scheduler.fleet import Member
from prfaas.scheduler.heartbeat import Heartbeat, LinkReport
from prfaas.scheduler.placing import NoNode, Placement
from prfaas.scheduler.view import PeerView
from prfaas.server.cluster_body import cluster_body
from prfaas.server.explaining import Alternative, RouteExplanation, explanation_body
from prfaas.server.fleet_view import FleetView, MemberView, RoutingView
from prfaas.server.node import NodeLoad
from prfaas.transport.link_state import LinkState
from prfaas.types import Request, RouteName
from tests.server.fake_node import TOKENIZER, FakeNode
from tests.server.fleet import fleet, request
from tests.server.http_face import CHAT, running

LOCAL = Alternative(
    peer=None, refusal=None, num_tokens=5, queue_tokens=0, num_kv_bytes=0, predicted_ttft_s=0.1
)


class ExplainingNode(FakeNode):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Request, RouteName | None]] = []

    async def explain(
        self, request: Request, force_route: RouteName | None = None
    ) -> RouteExplanation | Explanation:
        self.asked.append((request, force_route))
        return RouteExplanation(
            route=Route(name="local", reason="short", predicted_ttft_s=0.1),
            num_tokens=len(request.prompt_tokens),
            hit_tokens=0,
            policy="predictive",
            threshold_tokens=512.0,
            alternatives=(LOCAL,),
        )


async def test_a_prompt_is_explained_from_a_query_or_from_a_body_and_nothing_runs():
    node = ExplainingNode()
    async with running(node) as face:
        answers = [
            await face.get("/debug/route", params={"prompt": "some secret text"}),
            await face.get("/debug/route", params={"tokens": "5,6,7", "route": "remote"}),
            await face.post("/debug/route", {"model": "tiny", "prompt": [5, 6]}),
            await face.post("/debug/route", CHAT),
        ]
    assert [status for status, _ in answers] == [200] * 4
    asked = [asked for asked, _ in node.asked]
    assert asked[0].prompt_tokens == tuple(TOKENIZER.encode("some secret text", add_bos=True))
    assert [each.prompt_tokens for each in asked[1:3]] == [(5, 6, 7), (5, 6)]
    assert [force for _, force in node.asked] == [None, "remote", None, None]
    assert not node.requests
    body = answers[1][1]
    assert (body["route"], body["reason"], body["prompt_tokens"]) == ("local", "short", 3)
    assert body["alternatives"][0]["is_chosen"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({}, "neither prompt nor tokens in the query"),
        ({"tokens": "1,x"}, "tokens: token ids"),
        ({"tokens": ""}, "tokens: token ids"),
        ({"prompt": "a", "route": "up"}, "route: local or remote"),
    ],
)
async def test_what_cannot_be_explained_is_refused(query, message):
    async with running(ExplainingNode()) as face:
        status, body = await face.get("/debug/route", params=query)
        assert status == 400
        assert body["error"]["message"].startswith(message)
        status, body = await face.post("/debug/route", {"model": "tiny", "prompt": ["a", "b"]})
        assert status == 400
        assert "one is explained" in body["error"]["message"]


async def test_a_prompt_that_is_explained_reaches_no_log():
    with structlog.testing.capture_logs() as events:
        async with running(ExplainingNode()) as face:
            await face.get("/debug/route", params={"prompt": "some secret text"})
            await face.get("/debug/route", params={"prompt": "some secret text", "route": "up"})
    assert "secret" not in repr(events)


async def test_the_cluster_and_routes_are_the_operators(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("tenant\n")
    keys.chmod(0o600)
    async with running(ExplainingNode(), api_key="operator", api_key_file=str(keys)) as face:
        for path in ("/v1/cluster", "/debug/route?prompt=a"):
            for key, expected in (("tenant", 403), ("operator", 200), ("other", 401)):
                status, _ = await face.get(path, headers={"Authorization": f"Bearer {key}"})
                assert status == expected, (path, key)


async def test_what_is_explained_is_what_happens_and_leaves_no_trace():
    async with fleet() as nodes:
        await nodes.ask(request(60, variant=1))
        for num_tokens, variant in ((20, 0), (100, 0), (100, 1)):
            asked = request(num_tokens, variant=variant)
            before = nodes.pd_cache.counts()
            explained = await nodes.pd.explain(asked)
            assert nodes.pd_cache.counts() == before
            assert nodes.pd.load().num_transfers == 0
            record = (await nodes.ask(asked)).record
            assert (explained.route.name, explained.route.reason) == (record.route, record.reason)
            assert explained.route.peer == record.peer
        explained = await nodes.pd.explain(request(100), "local")
        assert (explained.route.name, explained.route.reason) == ("local", "forced")
        here, there = explained.alternatives
        assert (here.peer, there.peer) == (None, nodes.pd.peer and nodes.pd.peer.name)
        assert there.num_kv_bytes > 0 == here.num_kv_bytes


async def test_a_hit_is_seen_without_being_counted():
    async with fleet() as nodes:
        asked = request(100, variant=3)
        assert (await nodes.pd.explain(asked)).hit_tokens == 0
        await nodes.ask(asked)
        num_lookups = nodes.pd_cache.counts().lookups
        explained = await nodes.pd.explain(asked)
        assert nodes.pd_cache.counts().lookups == num_lookups
        keys = block_keys(b"r" * 32, asked.prompt_tokens, nodes.pd_cache.layout.block_tokens)
        assert nodes.pd_cache.peek(keys, 100) == 0
        assert explained.hit_tokens == (await nodes.ask(asked)).record.tokens_reused > 0


def test_a_placement_is_told_with_every_node_that_was_looked_at():
    placed = Placement(
        decode_at="d:1",
        decode_reason="prefix",
        reason="long",
        prefill_at="p:1",
        predicted_ttft_s=0.5,
    )
    candidate = Candidate(
        node="d:1", use="decode", refusal=None, hit_tokens=64, num_active=1, queue_tokens=0,
        cost_s=float("inf"), is_chosen=True,
    )  # fmt: skip
    told = explanation_body(Explanation(answer=placed, candidates=(candidate,)), 100)
    assert (told["route"], told["decode_at"], told["prefill_at"]) == ("remote", "d:1", "p:1")
    alternatives: Any = told["alternatives"]
    assert alternatives[0]["cost_s"] is None  # JSON has no infinity
    nobody = Explanation(answer=NoNode(reason="dead", retry_after_s=2.0), candidates=())
    assert explanation_body(nobody, 100)["reason"] == "dead"


def test_a_node_shows_itself_its_peers_and_who_pulls_from_it():
    load = NodeLoad(
        num_running=2,
        pages={"free": 1},
        routing=RoutingView(policy="static", threshold_tokens=100, egress_target=0.7),
        member=MemberView(scheduler="s:1", name="n:1", cluster="eu", mode="both", state="joined"),
        peers={"p:1": PeerView(peer="p:1", state="ready", heard_s=7.0, num_queue_tokens=3)},
        peers_usable={"p:1": True},
        links={"p:1": LinkState().view(), "a": LinkState().view()},
    )
    told: Any = json.loads(json.dumps(cluster_body("pd", load, 9.0), allow_nan=False))
    assert told["node"]["name"] == "n:1"
    assert told["routing"]["threshold_tokens"] == 100
    assert told["fleet"]["state"] == "joined"
    peer = told["peers"]["p:1"]
    assert (peer["is_usable"], peer["heard_s_ago"], peer["queue_tokens"]) == (True, 2.0, 3)
    assert peer["link"]["streams"] == 0
    assert list(told["askers"]) == ["a"]


def test_a_scheduler_shows_every_node_with_its_age_links_and_mode():
    beat = Heartbeat(
        node="n:1", role="pd", cluster="eu", mode="decode", epoch=1,
        links={"p:1": LinkReport(rtt_s=0.01, bytes_per_s=float("inf"))},
    )  # fmt: skip
    member = Member(
        heartbeat=beat, numerics="f", state="ready", wanted_mode="both", age_s=0.5,
        num_inflight=1, num_active=2, queue_tokens=3,
    )  # fmt: skip
    fleet_view = FleetView(members=(member,), threshold_tokens={"eu": 640.0}, num_keys=4)
    told: Any = cluster_body("scheduler", NodeLoad(fleet=fleet_view), 0.0)
    json.dumps(told, allow_nan=False)
    assert told["clusters"] == {"eu": {"threshold_tokens": 640.0, "modes": {"decode": 1}}}
    node = told["nodes"]["n:1"]
    assert (node["mode"], node["wanted_mode"], node["state"]) == ("decode", "both", "ready")
    assert (node["heard_s_ago"], node["requests_placed"], node["queue_tokens"]) == (0.5, 1, 3)
    assert node["links"]["p:1"] == {"rtt_s": 0.01, "bytes_per_s": None, "retransmitted": None}
