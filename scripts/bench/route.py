#!/usr/bin/env python
"""Measures a routing decision over a directory of a million blocks and 100 nodes.

    scripts/bench/route.py --json
    scripts/bench/route.py --places           # of a model with states: it is continued where there is one

A decision is the lookup of the longest prefix that each node has, and `Router.route` over all nodes; the
keys of the prompt's blocks are given. Half of the prompts go on from a conversation that some node has,
at a length drawn at random, the others share a system prompt that many nodes have; both end in
blocks that nobody has. `static` (of which `prompts` tells) sends every prompt to a peer; `predictive`, the default, compares the best one with this
node, whose rate is known, too. What it decides differs, so do the times: a local route books nothing.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import perf_counter, thread_time

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.scheduler.directory import BlockEvent, Directory
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.router import Router, RouteRequest
from prfaas.scheduler.view import LocalView

BLOCK_TOKENS = 64
PROMPTS = {"1K": 1_024, "27K": 27_648, "128K": 131_072}
SYSTEM_BLOCKS = 32
EVENT_KEYS = 256
PLACE_EVERY = 16
NUM_EVENTS = 1_000
POLICIES = {"static": SchedulerOptions(threshold_tokens=0), "predictive": SchedulerOptions()}
KV_BYTES_PER_TOKEN = 17_280


def filled(
    directory: Directory, random: Random, *, num_blocks: int, nodes: Sequence[str], deepest: int
) -> list[list[bytes]]:
    """Let nodes tell of conversations until the directory has so many blocks; return their chains."""
    system = [random.randbytes(32) for _ in range(SYSTEM_BLOCKS)]
    sequences = dict.fromkeys(nodes, 0)

    def tell(node: str, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), EVENT_KEYS):
            sequences[node] += 1
            added = tuple(keys[start : start + EVENT_KEYS])
            told = BlockEvent(
                node=node,
                epoch=1,
                sequence=sequences[node],
                added=added,
                places_added=added[PLACE_EVERY - 1 :: PLACE_EVERY],
            )
            assert directory.apply(told), "news"

    for node in nodes[::2]:
        tell(node, system)
    chains = []
    while directory.num_keys < num_blocks:
        lacking = num_blocks - directory.num_keys
        length = min(random.randint(1, deepest), lacking)
        chain = system + [random.randbytes(32) for _ in range(length)]
        num_holders = min(random.choice([1, 1, 1, 2, 8]), len(nodes))
        for node in random.sample(nodes, num_holders):
            tell(node, chain[: random.randint(SYSTEM_BLOCKS, len(chain))])
        chains.append(chain)
    return chains


def event_rates(directory: Directory, random: Random) -> dict[str, float]:
    """Return keys per CPU second of events by which a new node gets blocks, and loses them again."""
    events = [tuple(random.randbytes(32) for _ in range(EVENT_KEYS)) for _ in range(NUM_EVENTS)]
    num_keys = NUM_EVENTS * EVENT_KEYS
    begin = thread_time()
    for index, keys in enumerate(events):
        directory.apply(BlockEvent(node="new", epoch=1, sequence=index + 1, added=keys))
    added = thread_time()
    for index, keys in enumerate(events):
        sequence = NUM_EVENTS + index + 1
        directory.apply(BlockEvent(node="new", epoch=1, sequence=sequence, removed=keys))
    removed = thread_time()
    directory.forget("new")
    return {
        "added_keys_per_s": num_keys / (added - begin),
        "removed_keys_per_s": num_keys / (removed - added),
    }


def fleet(nodes: Sequence[str], random: Random, options: SchedulerOptions) -> Router:
    """Return a router that has heard all nodes, each with its own queue."""
    router = Router(peers=nodes, options=options)
    for node in nodes:
        rate = random.uniform(5_000, 20_000)
        queue = random.randrange(200_000)
        router.heard(
            node, now_s=0.0, is_ready=True, num_queue_tokens=queue, prefill_tokens_per_s=rate
        )
    return router


def asked(chains: Sequence[list[bytes]], random: Random, num_blocks: int) -> list[bytes]:
    """Return a prompt's keys, each made anew as hashing would."""
    chain = random.choice(chains)
    shared = SYSTEM_BLOCKS if random.random() < 0.5 else random.randint(0, len(chain))
    keys = [bytes(bytearray(key)) for key in chain[: min(shared, num_blocks)]]
    return keys + [random.randbytes(32) for _ in range(num_blocks - len(keys))]


def measured(
    directory: Directory,
    router: Router,
    chains: Sequence[list[bytes]],
    random: Random,
    *,
    num_tokens: int,
    num_prompts: int,
) -> dict[str, float]:
    """Return microseconds of the decisions for prompts of one length, by the clock and of the CPU.

    On a machine that does other work, too, the clock's are those of its scheduler in the end.
    """
    local = LocalView(prefill_tokens_per_s=1_000.0)
    lookups, totals, cpus, num_hits = [], [], [], 0
    for index in range(num_prompts):
        keys = asked(chains, random, num_tokens // BLOCK_TOKENS)
        begin_cpu, begin = thread_time(), perf_counter()
        hits = directory.lookup(keys)
        looked = perf_counter()
        num_kv_bytes = KV_BYTES_PER_TOKEN * num_tokens
        request = RouteRequest(
            num_tokens=num_tokens, hit_tokens=0, num_kv_bytes=num_kv_bytes, peer_hit_tokens=hits
        )
        route = router.route(str(index), request, local=local, now_s=1.0)
        end, end_cpu = perf_counter(), thread_time()
        lookups.append(looked - begin)
        totals.append(end - begin)
        cpus.append(end_cpu - begin_cpu)
        num_hits += route.peer in hits
        if route.peer is not None:
            router.ended(str(index), "completed", now_s=1.0)
    lookups.sort()
    totals.sort()
    cpus.sort()
    at_50, at_99 = num_prompts // 2, num_prompts * 99 // 100
    return {
        "p50_us": 1e6 * totals[at_50],
        "p99_us": 1e6 * totals[at_99],
        "cpu_p50_us": 1e6 * cpus[at_50],
        "cpu_p99_us": 1e6 * cpus[at_99],
        "lookup_p50_us": 1e6 * lookups[at_50],
        "lookup_p99_us": 1e6 * lookups[at_99],
        "hit_fraction": num_hits / num_prompts,
    }


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", action="store_true", help="continue only at every 16th block")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    random = Random(given.seed)
    nodes = [f"node-{index:03d}" for index in range(given.nodes)]
    before = resident_bytes()
    directory = Directory(block_tokens=BLOCK_TOKENS, has_places=given.places)
    deepest = max(PROMPTS.values()) // BLOCK_TOKENS
    chains = filled(directory, random, num_blocks=given.blocks, nodes=nodes, deepest=deepest)
    gc.collect()
    gc.freeze()  # the chains are this script's; the directory itself is nothing that the collector walks
    report: dict[str, object] = {
        "blocks": directory.num_keys,
        "nodes": given.nodes,
        "bytes_per_block": (resident_bytes() - before) / directory.num_keys,
    }
    for section, policy in (("prompts", "static"), ("predictive", "predictive")):
        router = fleet(nodes, Random(given.seed), POLICIES[policy])
        report[section] = {
            name: measured(
                directory, router, chains, random, num_tokens=tokens, num_prompts=given.prompts
            )
            for name, tokens in PROMPTS.items()
        }
    report["events"] = event_rates(directory, random)
    if given.json:
        print(json.dumps(report, indent=2))
        return
    print(
        f"{directory.num_keys} blocks, {given.nodes} nodes, {report['bytes_per_block']:.0f} B each"
    )
    for section in ("prompts", "predictive"):
        rows = report[section]
        assert isinstance(rows, dict)
        for name, row in rows.items():
            numbers = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
            print(f"{section:>10} {name:>5}: {numbers}")
    events = report["events"]
    assert isinstance(events, dict)
    print("    events: " + "  ".join(f"{key} {value:.3g}" for key, value in events.items()))


if __name__ == "__main__":
    main()
