"""Why a prompt goes where it goes, as JSON: the node's own routes, or a fleet's placement."""

from dataclasses import asdict, dataclass
from math import isfinite

from prfaas.scheduler.decision import Route
from prfaas.scheduler.explaining import Candidate, Explanation
from prfaas.scheduler.placing import NoNode, Placement
from prfaas.scheduler.policies import PolicyName
from prfaas.server.openai.answers import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One place where a node could have a prompt prefilled."""

    peer: str | None
    """None is the node itself."""
    refusal: str | None
    """Why it is out of the question; None if it is not."""
    num_tokens: int
    """Prompt tokens to compute there."""
    queue_tokens: int
    """Before them, as far as is known."""
    num_kv_bytes: int
    """KV to bring from there."""
    predicted_ttft_s: float | None
    """None while rates are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteExplanation:
    """The route that a prompt would have now, and all that it was chosen from."""

    route: Route
    num_tokens: int
    hit_tokens: int
    """Leading tokens that are here."""
    policy: PolicyName
    threshold_tokens: float
    alternatives: tuple[Alternative, ...]


def explanation_body(explained: RouteExplanation | Explanation, num_tokens: int) -> Json:
    """Return the answer to /debug/route; no word of the prompt is in it."""
    if isinstance(explained, Explanation):
        return _fleet_body(explained, num_tokens)
    route = explained.route
    return {
        "object": "route",
        "prompt_tokens": num_tokens,
        "hit_tokens": explained.hit_tokens,
        "uncached_tokens": explained.num_tokens - explained.hit_tokens,
        "policy": explained.policy,
        "threshold_tokens": explained.threshold_tokens,
        "route": route.name,
        "reason": route.reason,
        "peer": route.peer,
        "predicted_ttft_s": _finite(route.predicted_ttft_s),
        "alternatives": [
            {
                "route": "local" if each.peer is None else "remote",
                "peer": each.peer,
                "is_chosen": each.peer == route.peer,
                "refusal": each.refusal,
                "tokens_to_compute": each.num_tokens,
                "queue_tokens": each.queue_tokens,
                "kv_bytes": each.num_kv_bytes,
                "predicted_ttft_s": _finite(each.predicted_ttft_s),
            }
            for each in explained.alternatives
        ],
    }


def _fleet_body(explained: Explanation, num_tokens: int) -> Json:
    body: Json = {"object": "route", "prompt_tokens": num_tokens}
    match explained.answer:
        case Placement() as placed:
            prefill_at = placed.prefill_at or placed.decode_at
            body |= {
                "route": "local" if prefill_at == placed.decode_at else "remote",
                "reason": placed.reason,
                "decode_at": placed.decode_at,
                "decode_reason": placed.decode_reason,
                "prefill_at": prefill_at,
                "prefix_from": placed.prefix_from,
                "prefix_tokens": placed.prefix_tokens,
                "predicted_ttft_s": _finite(placed.predicted_ttft_s),
            }
        case NoNode(reason=reason, retry_after_s=retry_after_s):
            body |= {"route": None, "reason": reason, "retry_after_s": retry_after_s}
    return body | {"alternatives": [_candidate(each) for each in explained.candidates]}


def _candidate(candidate: Candidate) -> Json:
    return asdict(candidate) | {
        "predicted_ttft_s": _finite(candidate.predicted_ttft_s),
        "cost_s": _finite(candidate.cost_s),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
