"""The ways that a prompt can go: each cluster with what it has, and with cache that is moved there first.

Where bandwidth is scarce each cluster's cache is judged alone; where it is plentiful the longest prefix
that any cluster has is used, and moved where that saves prefill (PrfaaS §3.4.3). Which it is, the price
of bytes says: nothing while the egress budget is full.

A movement has to be worth its time even where the wait hides it: others overtake who is not in the queue
yet. (Priced by the predicted TTFT alone, prefixes of a block moved with 180 MB of states.)
"""

from dataclasses import replace
from math import inf
from typing import NamedTuple

from prfaas.scheduler.forecast import ClustersView, Profiles, Prompt, RemoteView, remote_ttft_s

PRICE = 2.0


class Movement(NamedTuple):
    """A prefix that is sent to the cluster of a prefill, before it begins: over the link between the two."""

    source: int | None
    """The PrfaaS cluster that has it, by its place in the view; None is the local cluster."""
    num_tokens: int
    """Its length: the prefill computes what comes after."""
    num_bytes: float


class Way(NamedTuple):
    """One way for a prompt."""

    cost_s: float
    """The predicted TTFT, what it costs others, and the price of the bytes."""
    ttft_s: float
    price_s: float
    remote: int | None
    """The PrfaaS cluster that prefills; None is the local one."""
    is_idle: bool
    """Whether nobody waits there, and the link has room."""
    movement: Movement | None = None


def behind(prompt: Prompt, movement: Movement, remote: int | None) -> Prompt:
    """Return the prompt as it is once the prefix is there: at a PrfaaS cluster, or here for None."""
    if remote is None:
        return replace(prompt, local_hit_tokens=movement.num_tokens)
    hits = list(prompt.remote_hit_tokens or (0,) * (remote + 1))
    hits[remote] = movement.num_tokens
    return replace(prompt, remote_hit_tokens=tuple(hits))


def ways(
    profiles: Profiles,
    prompt: Prompt,
    view: ClustersView,
    now_s: float,
    *,
    concern: float,
    max_backlog_s: float = inf,
) -> list[Way]:
    """Return the ways that there are, the local one first; none where no cluster can serve.

    Args:
        profiles: of both sides.
        prompt: with what each cluster has of it.
        view: of all clusters.
        now_s: on the clock of the view.
        concern: how much the delay of others counts beside one's own.
        max_backlog_s: a link with more than that under way has no room.
    """
    found = []
    candidates = view.candidates(now_s)
    if view.local.num_instances > 0:
        wait_s = view.local.wait_s(now_s)
        others = concern * view.local.delayed_jobs()
        work_s = profiles.local_work_s(prompt)
        cost_s = wait_s + work_s + others * work_s
        found.append(Way(cost_s, wait_s + work_s, 0.0, None, wait_s <= 0))
        if view.moves_cache:
            for index in candidates:
                way = _here(profiles, prompt, view.remotes[index], index, wait_s, others)
                if way is not None:
                    has_room = _has_room(view.remotes[index], max_backlog_s)
                    found.append(way if has_room else way._replace(is_idle=False))
    if not candidates:
        return found
    num_bytes = profiles.kv_bytes(prompt)
    works_s = profiles.remote_works_s(prompt, len(view.remotes))
    for index in candidates:
        remote, work_s = view.remotes[index], works_s[index]
        ttft_s = remote_ttft_s(remote, now_s, work_s=work_s, num_bytes=num_bytes)
        price_s = bytes_price_s(remote, num_bytes)
        others = concern * remote.prefill.delayed_jobs()
        is_idle = _has_room(remote, max_backlog_s) and remote.prefill.wait_s(now_s) <= 0
        cost_s = ttft_s + others * work_s + price_s
        found.append(Way(cost_s, ttft_s, price_s, index, is_idle))
        held_tokens = prompt.num_tokens - prompt.remote_tokens(index)
        if view.moves_cache and prompt.local_hit_tokens > held_tokens:
            found.append(_there(profiles, prompt, remote, index, now_s, others, found[-1]))
    return found


def _has_room(remote: RemoteView, max_backlog_s: float) -> bool:
    return remote.link.backlog_bytes <= max_backlog_s * remote.link.bytes_per_s


def _here(
    profiles: Profiles, prompt: Prompt, remote: RemoteView, index: int, wait_s: float, others: float
) -> Way | None:
    """Return the local prefill that begins where a PrfaaS cluster's cache ends, if that is further."""
    hit_tokens = prompt.num_tokens - prompt.remote_tokens(index)
    if hit_tokens <= prompt.local_hit_tokens:
        return None
    num_bytes = profiles.prefix_bytes(hit_tokens, prompt.local_hit_tokens)
    link = remote.link
    moved_s = (link.backlog_bytes + num_bytes) / link.bytes_per_s + link.rtt_s
    work_s = profiles.local.prefill_s(prompt.num_tokens - hit_tokens)
    ttft_s = max(wait_s, moved_s) + work_s
    price_s = bytes_price_s(remote, num_bytes)
    movement = Movement(index, hit_tokens, num_bytes)
    cost_s = ttft_s + min(wait_s, moved_s) + others * work_s + price_s
    return Way(cost_s, ttft_s, price_s, None, wait_s <= 0, movement)


def _there(
    profiles: Profiles,
    prompt: Prompt,
    remote: RemoteView,
    index: int,
    now_s: float,
    others: float,
    alone: Way,
) -> Way:
    """Return the prefill at a PrfaaS cluster that begins where the local cache ends.

    The way there is taken to be as wide as the way back, and its bytes cost as much.
    """
    assert profiles.remote is not None, "a PrfaaS cluster without a profile"
    hit_tokens, link = prompt.local_hit_tokens, remote.link
    held_tokens = prompt.num_tokens - prompt.remote_tokens(index)
    num_bytes = profiles.prefix_bytes(hit_tokens, held_tokens)
    moved_s = (link.outgoing_backlog_bytes + num_bytes) / link.bytes_per_s + link.rtt_s / 2
    work_s = profiles.remote.prefill_s(prompt.num_tokens - hit_tokens)
    wait_s = remote.prefill.wait_s(now_s)
    computed_s = max(wait_s, moved_s) + work_s
    arrived_s = (link.backlog_bytes + profiles.kv_bytes(prompt)) / link.bytes_per_s
    ttft_s = max(computed_s, arrived_s) + link.rtt_s
    price_s = alone.price_s + bytes_price_s(remote, num_bytes)
    cost_s = ttft_s + min(wait_s, moved_s) + others * work_s + price_s
    movement = Movement(None, hit_tokens, num_bytes)
    return Way(cost_s, ttft_s, price_s, index, alone.is_idle, movement)


def bytes_price_s(remote: RemoteView, num_bytes: float) -> float:
    """Return what the bytes cost, in seconds: their time at the budget's rate, times its scarcity.

    Nothing while the budget is full, PRICE once it is spent, twice that when as much is overdrawn:
    the rest of the link is for bursts, and a queue here that is long enough is one. Without any budget no
    bytes are cheap enough.
    """
    link = remote.link
    if link.budget_limit_bytes == inf:
        return 0.0
    if link.budget_limit_bytes <= 0:
        return inf
    scarcity = 1 - link.budget_bytes / link.budget_limit_bytes
    return PRICE * scarcity * num_bytes / link.budget_bytes_per_s
