"""Says of each node what speaks for and against it for one request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prfaas.scheduler.directing import Offer
from prfaas.scheduler.placing import (
    NoNode,
    Placement,
    Wanted,
    cost_s,
    decode_refusal,
    local_s,
    prefill_refusal,
)
from prfaas.scheduler.standing import Standing
from prfaas.scheduler.work import Assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One node that was looked at for a request."""

    node: str
    use: Literal["decode", "prefill"]
    refusal: str | None
    """Why it was out of the question; None if it was not."""
    hit_tokens: int
    num_active: int
    queue_tokens: int
    predicted_ttft_s: float | None = None
    """Of a prefill there; None while its rate is unknown."""
    cost_s: float | None = None
    """The predicted seconds by which decoders are compared, with assumptions where nothing is known."""
    is_chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A placement and all that it was chosen from."""

    answer: Placement | NoNode
    candidates: tuple[Candidate, ...]
    """Each pd node as a decoder and each that only prefills, by use and name."""


def candidates(
    wanted: Wanted,
    nodes: Iterable[Standing],
    offers: Mapping[str, Offer],
    answer: Placement | NoNode,
    guess: Assumed,
    now_s: float,
) -> tuple[Candidate, ...]:
    """Return what was to choose from, and which of it the answer is."""
    placed = answer if isinstance(answer, Placement) else None
    found = []
    for node in nodes:
        if node.can_prefill:
            found.append(_prefiller(wanted, node, offers, placed, now_s))
        else:
            found.append(_decoder(wanted, node, offers, placed, guess, now_s))
    return tuple(sorted(found, key=lambda each: (each.use, each.node)))


def _decoder(
    wanted: Wanted,
    node: Standing,
    offers: Mapping[str, Offer],
    placed: Placement | None,
    guess: Assumed,
    now_s: float,
) -> Candidate:
    rest, price = offers[node.cluster].rest, node.price(guess)
    hit_tokens = wanted.hit_of(node.name)
    predicted_s = None
    if node.token_s is not None:
        predicted_s = local_s(wanted, hit_tokens, price, rest)[0]
        predicted_s += node.slot_wait_s(guess, wanted.num_sequences)
    return Candidate(
        node=node.name,
        use="decode",
        refusal=decode_refusal(wanted, node, now_s),
        hit_tokens=hit_tokens,
        num_active=node.load.num_active,
        queue_tokens=node.load.queue_tokens,
        predicted_ttft_s=predicted_s,
        cost_s=cost_s(wanted, node, hit_tokens, rest, guess),
        is_chosen=placed is not None and placed.decode_at == node.name,
    )


def _prefiller(
    wanted: Wanted,
    node: Standing,
    offers: Mapping[str, Offer],
    placed: Placement | None,
    now_s: float,
) -> Candidate:
    """Return a node that prefills for others, as the cluster sees it that would decode, or the first one."""
    refusal: str | None = prefill_refusal(wanted, node, now_s)
    predicted_s = None
    for offer in offers.values():
        view = next((peer for peer in (*offer.near, *offer.wide) if peer.peer == node.name), None)
        if view is not None:
            refusal = view.refusal(now_s)
            num_bytes, tail_bytes = wanted.sizes(0)
            predicted_s = view.ttft_s(
                num_tokens=wanted.num_tokens - wanted.hit_of(node.name),
                num_kv_bytes=num_bytes,
                num_tail_bytes=tail_bytes,
            )
            break
    return Candidate(
        node=node.name,
        use="prefill",
        refusal=refusal,
        hit_tokens=wanted.hit_of(node.name),
        num_active=node.load.num_active,
        queue_tokens=node.load.queue_tokens,
        predicted_ttft_s=predicted_s,
        is_chosen=placed is not None and placed.prefill_at == node.name,
    )
