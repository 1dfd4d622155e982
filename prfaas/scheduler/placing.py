"""Which node decodes a request: by its load, and by what its cache saves of the prompt.

Pure: values and node standings in, a choice out. A prefix hit is worth the prefill that it saves, in seconds,
and a busy node costs the seconds that one waits there; so the node with a hot prefix gets what it can
serve, and what is beyond that goes to the next one (PrfaaS §3.4.3: by request, network and cache).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, get_args

from prfaas.scheduler.router import Reason
from prfaas.scheduler.standing import Refusal, Standing
from prfaas.scheduler.work import Assumed, Job, Price
from prfaas.types import RouteName

KvBytes = Callable[[int, int], int]
"""(tokens of a prompt, leading tokens that are held) -> bytes of KV that lack."""

PlacementReason = Reason | Literal["at_decoder", "pd_prefill", "pd_prefill_earlier"]
"""Why the prefill is where it is. Besides a route's: at_decoder: a node that only decodes computes the little that
lacks. pd_prefill: the node only decodes. pd_prefill_earlier: it could prefill, another one of its cluster sooner."""
DecodeReason = Literal["only", "prefix", "spilled", "sooner", "least_loaded"]
"""only: there was no choice. prefix: it has the longest hit of all. spilled: one with a longer hit is too busy.
sooner: one with a longer hit is idle, and yet slower.
least_loaded: no hit made a difference."""
NoNodeReason = Literal["no_node", "converting", "numerics", "excluded", Refusal]
"""converting: it takes another mode. numerics: no node has the fingerprint in which the answer began. excluded: all were tried."""

PLACEMENT_REASONS: frozenset[str] = frozenset(
    (*get_args(Reason), "at_decoder", "pd_prefill", "pd_prefill_earlier")
)
DECODE_REASONS: frozenset[str] = frozenset(get_args(DecodeReason))
REFUSALS: tuple[NoNodeReason, ...] = (
    "refusing",
    "converting",
    "suspected",
    "not_ready",
    "draining",
    "dead",
    "excluded",
    "numerics",
    "no_node",
)
"""From the node that is nearest to being of use to the one that is furthest."""
NO_NODE_REASONS: frozenset[str] = frozenset(REFUSALS)

ALIKE_FRACTION, ALIKE_S = 0.02, 1e-3
"""Costs that differ by less are alike: predictions are not that good."""
MAX_TOKENS_AT_DECODER = 128
"""So few lacking tokens a node that only decodes computes itself: a transfer takes longer."""
MIN_FETCH_GAIN_S = 0.01
TRANSFER_S = 0.05
"""What any transfer takes, however little it moves: asking, finding the pages, attaching the streams."""
FETCH_CONCERN = 1.0
"""Of the time of a fetched prefix, that it costs others."""
MIN_RETRY_S = 1.0
"""By then a heartbeat may have changed everything."""


def no_bytes(num_tokens: int, held_tokens: int) -> int:
    """Return 0: the KV of a model whose layout is unknown."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be placed: a prompt, or the rest of an answer with what was sent of it."""

    num_tokens: int
    hits: Mapping[str, int] = field(default_factory=dict)
    """Node -> leading tokens that its cache has, as far as is known."""
    kv_bytes: KvBytes = no_bytes
    tail_bytes: KvBytes = no_bytes
    """The part of these that only the last token makes: windows and states."""
    force: RouteName | None = None
    num_sequences: int = 1
    max_tokens: int | None = None
    """That each of them may draw; None is unknown."""
    numerics: str | None = None
    """The fingerprint that the answer began in; None for one that has not begun."""
    excluded: frozenset[str] = frozenset()
    """Nodes that were tried."""
    known_hits: dict[str, int] = field(init=False, repr=False, compare=False)
    """The hits, each of which leaves a token to compute; those of 0 are left out."""
    _sizes: dict[int, tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _jobs: dict[float, Job] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Bound the hits. Raises ValueError for an empty prompt."""
        most = self.num_tokens - 1
        if most < 0:
            raise ValueError(f"a prompt of {self.num_tokens} tokens")
        hits = {node: min(hit, most) for node, hit in self.hits.items() if hit > 0 and most}
        object.__setattr__(self, "known_hits", hits)

    def hit_of(self, node: str) -> int:
        """Return the leading tokens that a node has; one at least is left to compute."""
        return self.known_hits.get(node, 0)

    def job(self, guess: Assumed) -> Job:
        """Return what the request brings to its decoder, but for the prefill; worked out once for each guess."""
        tokens = guess.output_tokens
        if self.max_tokens is not None and self.max_tokens < tokens:
            tokens = float(self.max_tokens)
        job = self._jobs.get(tokens)
        if job is None:
            output_tokens = self.num_sequences * tokens
            num_bytes = self.kv_bytes(self.num_tokens + round(output_tokens), 0)
            job = self._jobs[tokens] = Job(0, self.num_sequences, output_tokens, num_bytes)
        return job

    def sizes(self, held_tokens: int) -> tuple[int, int]:
        """Return the bytes that lack for who holds so many tokens, and their tail; worked out once for each."""
        sizes = self._sizes.get(held_tokens)
        if sizes is None:
            num_tokens = self.num_tokens
            sizes = self.kv_bytes(num_tokens, held_tokens), self.tail_bytes(num_tokens, held_tokens)
            self._sizes[held_tokens] = sizes
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request is decoded, where its prompt is prefilled, and why."""

    decode_at: str
    decode_reason: DecodeReason
    reason: PlacementReason
    prefill_at: str | None = None
    """None is the node that decodes."""
    prefix_from: str | None = None
    """A node whose cached prefix is fetched first."""
    prefix_tokens: int = 0
    predicted_ttft_s: float | None = None
    """None while the rates are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNode:
    """No node can take the request now."""

    reason: NoNodeReason
    retry_after_s: float
    may_pass: bool = False
    """There is a node that may take it soon, without anybody's doing: it is worth a wait."""


class Source(NamedTuple):
    """The longest prefix that a node of a cluster has."""

    node: str
    num_tokens: int


class Elsewhere:
    """What the rest of a cluster offers to one prompt: a prefix, and a prefill, for a node with a given hit.

    The seconds depend on the node by its hit alone, and hits are few: each is worked out once.
    """

    def __init__(
        self,
        wanted: Wanted,
        *,
        source: Source | None,
        near_byte_s: float,
        prefill_s: Callable[[int], float],
    ) -> None:
        """Work out what is offered to nodes without a hit.

        Args:
            wanted: the prompt.
            source: the longest prefix in the cluster.
            near_byte_s: of a byte between two nodes of the cluster.
            prefill_s: hit of the decoder -> seconds to the first token of a prefill at another node; inf: none.
        """
        self.source = source
        self.source_tokens = 0 if source is None else source.num_tokens
        self._wanted = wanted
        self._near_byte_s = near_byte_s
        self._prefill_s = prefill_s
        self._prefill_s_of: dict[int, float] = {}
        self._fetch_s_of: dict[int, float] = {}
        self.cold_s = self.prefill_s(0)
        self.cold_fetch_s = 0.0 if source is None else self.fetch_s(0)
        """The two for a node without a hit."""

    def prefill_s(self, hit_tokens: int) -> float:
        """Return the seconds to the first token of a prefill elsewhere."""
        seconds = self._prefill_s_of.get(hit_tokens)
        if seconds is None:
            seconds = TRANSFER_S + self._prefill_s(hit_tokens)
            self._prefill_s_of[hit_tokens] = seconds
        return seconds

    def fetch_s(self, hit_tokens: int) -> float:
        """Return the seconds to fetch the longest prefix of the cluster, which is longer than the hit."""
        seconds = self._fetch_s_of.get(hit_tokens)
        if seconds is None:
            num_bytes = self._wanted.kv_bytes(self.source_tokens, hit_tokens)
            seconds = TRANSFER_S + num_bytes * self._near_byte_s
            self._fetch_s_of[hit_tokens] = seconds
        return seconds


def local_s(wanted: Wanted, hit_tokens: int, price: Price, rest: Elsewhere) -> tuple[float, float]:
    """Return the seconds to the first token of a prefill at a node, and those of a prefix that it fetches first.

    It fetches one where that saves more than it takes, else in 0 s; the queue goes on meanwhile.
    """
    token_s = price.token_s
    alone_s = price.queue_s + (wanted.num_tokens - hit_tokens) * token_s
    saved_s = (rest.source_tokens - hit_tokens) * token_s
    if saved_s <= MIN_FETCH_GAIN_S:
        return alone_s, 0.0
    fetch_s = rest.fetch_s(hit_tokens)
    if saved_s <= fetch_s + MIN_FETCH_GAIN_S:
        return alone_s, 0.0
    rest_s = (wanted.num_tokens - rest.source_tokens) * token_s
    return max(price.queue_s, fetch_s) + rest_s, fetch_s


class Choice(NamedTuple):
    """A node for a request, and why."""

    node: Standing
    reason: DecodeReason


def choose(
    wanted: Wanted,
    standings: Collection[Standing],
    rests: Mapping[str, Elsewhere],
    guess: Assumed,
    now_s: float,
) -> Choice | NoNode:
    """Return the decoder of the least cost; of those alike the one with more of the prefix, then of fewer requests.

    Of equal ones the one that was not chosen for longest, then by name. A node whose heartbeat is late, or
    that has to show first that it works, is chosen only if there is no other.
    """
    nodes = [node for node in standings if now_s <= node.decodes_until_s]
    if wanted.numerics is not None or wanted.excluded:
        nodes = [node for node in nodes if decode_refusal(wanted, node, now_s) is None]
    others: list[Standing] = []
    if len(nodes) < len(standings):
        others = [
            node
            for node in standings
            if now_s > node.decodes_until_s and decode_refusal(wanted, node, now_s) is None
        ]
        nodes += [node for node in others if not node.is_second_choice(now_s)]
    nodes = nodes or others
    if not nodes:
        return no_node(wanted, standings, now_s)
    best = _cheapest(wanted, nodes, rests, guess)
    return Choice(best, _reason(wanted, best, nodes))


def _cheapest(
    wanted: Wanted, nodes: list[Standing], rests: Mapping[str, Elsewhere], guess: Assumed
) -> Standing:
    hits, num_tokens, job = wanted.known_hits, wanted.num_tokens, wanted.job(guess)
    output_tokens, num_bytes, is_several = job.output_tokens, job.num_bytes, job.num_sequences > 1
    found: list[tuple[float, int, float, Standing]] = []
    least_s = limit_s = inf
    for node in nodes:
        price = node.load.price
        if price is None or price[0] is not guess:
            price = node.price(guess)
        _, token_s, queue_s, crowd_s, place_s, share, free_bytes = price
        if is_several or num_bytes > free_bytes:
            decode_s = node.decode_s(guess, price, job)
        else:
            decode_s = output_tokens * crowd_s + place_s
        if decode_s > limit_s:
            continue
        rest = rests[node.cluster]
        hit_tokens = hits.get(node.name, 0)
        if hit_tokens or node.only_decodes:
            seconds = decode_s + first_token_s(wanted, node, hit_tokens, price, rest)
        else:  # the same for a node that has nothing of the prompt, without the calls: most have not
            seconds = queue_s + num_tokens * token_s
            fetch_s, source_tokens = rest.cold_fetch_s, rest.source_tokens
            if source_tokens * token_s > fetch_s + MIN_FETCH_GAIN_S:
                seconds = queue_s if queue_s > fetch_s else fetch_s  # noqa: FURB136
                seconds += (num_tokens - source_tokens) * token_s + FETCH_CONCERN * fetch_s
            seconds = decode_s + (seconds if seconds < rest.cold_s else rest.cold_s)  # noqa: FURB136
        if seconds <= limit_s:
            found.append((seconds, hit_tokens, share, node))
            if seconds < least_s:
                least_s = seconds
                limit_s = least_s + max(ALIKE_FRACTION * least_s, ALIKE_S)
    _, _, _, _, best = min(
        (-hit_tokens, share, node.last_chosen, node.name, node)
        for seconds, hit_tokens, share, node in found
        if seconds <= limit_s
    )
    return best


def cost_s(
    wanted: Wanted, node: Standing, hit_tokens: int, rest: Elsewhere, guess: Assumed
) -> float:
    """Return the seconds by which decoders are compared: to the first token, and what decoding there costs."""
    price = node.price(guess)
    decode_s = node.decode_s(guess, price, wanted.job(guess))
    return decode_s + first_token_s(wanted, node, hit_tokens, price, rest)


def first_token_s(
    wanted: Wanted, node: Standing, hit_tokens: int, price: Price, rest: Elsewhere
) -> float:
    """Return the seconds to the first token if a node decodes, wherever the prefill is."""
    there_s = rest.prefill_s(hit_tokens)
    is_little = wanted.num_tokens - hit_tokens <= MAX_TOKENS_AT_DECODER
    if node.only_decodes and there_s < inf and not is_little:
        return there_s
    here_s, fetch_s = local_s(wanted, hit_tokens, price, rest)
    # What is fetched takes pages and a link, too, that others want.
    here_s += FETCH_CONCERN * fetch_s
    return there_s if there_s < here_s else here_s  # noqa: FURB136 - 2x min()


def decode_refusal(wanted: Wanted, node: Standing, now_s: float) -> NoNodeReason | None:
    """Return why a node cannot decode the request now, or None."""
    if node.heartbeat.role != "pd":
        return "no_node"
    if wanted.numerics is not None and node.numerics != wanted.numerics:
        return "numerics"
    if node.name in wanted.excluded:
        return "excluded"
    refusal = node.refusal(now_s)
    if refusal is None and not node.can_decode:
        return "converting" if node.wanted_mode is not None else "no_node"
    return refusal


def may_return(wanted: Wanted, node: Standing, now_s: float) -> bool:
    """Return whether a node that is of no use now may yet decode the request.

    One that is silent or failed may be heard again, one that loads be ready, one that prefills be given the
    other mode. One that drains goes for good. One that has no room has said when to come again: the client can, but
    not with an answer that has begun.
    """
    is_fit = wanted.numerics is None or node.numerics == wanted.numerics
    is_pd = node.heartbeat.role == "pd"
    return (
        is_pd
        and is_fit
        and node.name not in wanted.excluded
        and not node.heartbeat.is_draining
        and (wanted.numerics is not None or node.refusal(now_s) != "refusing")
    )


def prefill_refusal(wanted: Wanted, node: Standing, now_s: float) -> NoNodeReason | None:
    """Return why KV of a node cannot go into the answer, or it cannot be asked for any now; None if it can."""
    if wanted.numerics is not None and node.numerics != wanted.numerics:
        return "numerics"
    return "excluded" if node.name in wanted.excluded else node.refusal(now_s)


def no_node(wanted: Wanted, standings: Iterable[Standing], now_s: float) -> NoNode:
    """Return why no node decodes: the reason of the one nearest to being of use, and how long that may last."""
    reasons: list[tuple[NoNodeReason, Standing]] = [
        (decode_refusal(wanted, node, now_s) or "no_node", node) for node in standings
    ]
    met = {reason for reason, _ in reasons}
    reason: NoNodeReason = next((each for each in REFUSALS if each in met), "no_node")
    waits = [node.retry_after_s(now_s) for each, node in reasons if each == reason]
    return NoNode(
        reason=reason,
        retry_after_s=max(MIN_RETRY_S, min(waits, default=0.0)),
        may_pass=any(may_return(wanted, node, now_s) for node in standings),
    )


def _reason(wanted: Wanted, best: Standing, nodes: list[Standing]) -> DecodeReason:
    if len(nodes) == 1:
        return "only"
    hits = wanted.known_hits
    holders = [node for node in nodes if node.name in hits] if hits else []
    if not holders:
        return "least_loaded"
    longest = max(hits[node.name] for node in holders)
    if hits.get(best.name) == longest:
        return "prefix"
    loads = [node.load for node in holders if hits[node.name] == longest]
    return "spilled" if all(load.num_active or load.queue_tokens for load in loads) else "sooner"
