"""Ways to choose the cluster that prefills a prompt, side by side behind one interface.

`decide` reads a view and returns a decision: no clock, no randomness, no I/O, and nothing kept between
two decisions. No policy sends a prompt where no instance is while
another cluster has one.
"""

from dataclasses import dataclass
from math import exp, inf, isnan, log
from operator import attrgetter
from typing import Literal, Protocol, assert_never, get_args

from prfaas.scheduler.forecast import ClustersView, Profiles, Prompt, RemoteView, remote_ttft_s
from prfaas.scheduler.planner import Kind
from prfaas.scheduler.ways import Movement, Way, ways

PolicyName = Literal["local", "always-remote", "static", "threshold", "predictive"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

PolicyReason = Literal[
    "policy",
    "short",
    "long",
    "earlier",
    "spares_others",
    "egress_budget",
    "moves_cache",
    "within_slo",
    "late",
    "held",
    "no_remote",
    "no_local",
]
"""policy: it knows no other way. short, long: beside the threshold. earlier: the first token is
predicted earlier there. spares_others: later there, but those behind it gain more. egress_budget:
earlier at a PrfaaS cluster, if the link had room. moves_cache: with a
prefix that another cluster has. within_slo: the cheaper one would be too late.
late: no cluster is in time, and there nobody waits for it. held: nor is that so anywhere. no_remote,
no_local: that cluster has no instance, or no link."""

MAX_EGRESS_FRACTION = 0.7
"""Of a link, before bursts need the rest (PrfaaS §4)."""

QUEUE_GAIN_PER_S = 0.3
FULL_LINK_FACTOR = 2.0
CONCERN = 1.0
SLO_MARGIN = 0.9
"""Of the SLO, that a prediction has to be within: it may be off by the rest."""
LATE_LINK_FRACTION = 0.4
"""Of the SLO, that KVCache under way may take before a late prompt's bytes join it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where one prompt is prefilled, why, and when its first token is expected."""

    remote: int | None
    """The PrfaaS cluster, by its place in the view; None is the local cluster."""
    reason: PolicyReason
    predicted_ttft_s: float
    """From now on."""
    movement: Movement | None = None
    """The prefix that has to be there first; only of drivers that can move one."""
    is_held: bool = False
    """It stays at the scheduler, and is to be decided again when anything has changed."""


class Policy(Protocol):
    """A way to choose."""

    def decide(self, prompt: Prompt, view: ClustersView, now_s: float) -> Decision:
        """Return the decision for one prompt."""


def best_remote(
    profiles: Profiles, prompt: Prompt, view: ClustersView, now_s: float
) -> tuple[float, int] | None:
    """Return the least predicted TTFT of all PrfaaS clusters, and whose; None without any."""
    candidates = view.candidates(now_s)
    if not candidates:
        return None
    num_bytes = profiles.kv_bytes(prompt)
    works_s = profiles.remote_works_s(prompt, len(view.remotes))
    best_s, best = inf, candidates[0]
    for i in candidates:
        ttft_s = remote_ttft_s(view.remotes[i], now_s, work_s=works_s[i], num_bytes=num_bytes)
        if ttft_s < best_s:
            best_s, best = ttft_s, i
    return best_s, best


def _local(
    profiles: Profiles, prompt: Prompt, view: ClustersView, now_s: float, reason: PolicyReason
) -> Decision:
    ttft_s = profiles.local_ttft_s(prompt, view, now_s)
    return Decision(remote=None, reason=reason, predicted_ttft_s=ttft_s)


def _by_side(
    profiles: Profiles,
    prompt: Prompt,
    view: ClustersView,
    now_s: float,
    *,
    wants_remote: bool,
    reason: PolicyReason,
) -> Decision:
    """Return the side that is wanted, or the other one if that has no instance."""
    has_local = view.local.num_instances > 0
    if has_local and not wants_remote:
        return _local(profiles, prompt, view, now_s, reason)
    remote = best_remote(profiles, prompt, view, now_s)
    if not view.remotes or (remote is None and has_local):
        return _local(profiles, prompt, view, now_s, "no_remote" if wants_remote else reason)
    if remote is None:  # nobody can: it waits there for whoever comes back
        return Decision(remote=0, reason="no_local", predicted_ttft_s=inf)
    reason = reason if wants_remote else "no_local"
    return Decision(remote=remote[1], reason=reason, predicted_ttft_s=remote[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Everything stays."""

    profiles: Profiles

    def decide(self, prompt: Prompt, view: ClustersView, now_s: float) -> Decision:
        """Return the local cluster."""
        return _by_side(self.profiles, prompt, view, now_s, wants_remote=False, reason="policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysRemote:
    """Everything goes: the naive heterogeneous deployment."""

    profiles: Profiles

    def decide(self, prompt: Prompt, view: ClustersView, now_s: float) -> Decision:
        """Return a PrfaaS cluster."""
        return _by_side(self.profiles, prompt, view, now_s, wants_remote=True, reason="policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What is longer than t goes (PrfaaS §3.4.3, bandwidth scarce)."""

    profiles: Profiles
    threshold_tokens: float

    def decide(self, prompt: Prompt, view: ClustersView, now_s: float) -> Decision:
        """Return the side of t that the uncached length is on."""
        is_long = prompt.uncached_tokens > self.threshold_tokens
        reason: PolicyReason = "long" if is_long else "short"
        return _by_side(self.profiles, prompt, view, now_s, wants_remote=is_long, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """What is longer than t goes, and t follows: up as link or queue there fill, down as they empty.

    A higher t sends fewer and longer prompts, and each costs less of the link per second that it
    saves (PrfaaS §3.4.3). t moves by a power of what the queue there is longer than the one here, and
    beyond the allowed share of the link by up to FULL_LINK_FACTOR. It is a function of the view alone,
    so that nothing winds up while a view is late.
    """

    profiles: Profiles
    threshold_tokens: float
    """Where both queues are alike and the link has room."""
    gain_per_s: float = QUEUE_GAIN_PER_S
    """log(t) rises by it for each second that the wait there is longer than here."""
    max_egress_fraction: float = MAX_EGRESS_FRACTION
    range_factor: float = 16.0
    """t stays within `threshold_tokens` divided and multiplied by it."""

    def decide(self, prompt: Prompt, view: ClustersView, now_s: float) -> Decision:
        """Return the side of t that the uncached length is on."""
        is_long = prompt.uncached_tokens > self.adapted(view, now_s)
        reason: PolicyReason = "long" if is_long else "short"
        return _by_side(self.profiles, prompt, view, now_s, wants_remote=is_long, reason=reason)

    def adapted(self, view: ClustersView, now_s: float) -> float:
        """Return t for the queues and links of a view."""
        remotes = [view.remotes[index] for index in view.candidates(now_s)]
        here_s = view.local.wait_s(now_s)
        if not remotes or here_s == inf:
            return self.threshold_tokens
        use = min(remote.link.utilisation_fraction for remote in remotes)
        excess = (use - self.max_egress_fraction) / (1 - self.max_egress_fraction + 1e-9)
        excess = min(max(excess, 0.0), 1.0)
        limit = log(self.range_factor)
        lag_s = min(_delay_s(remote, now_s) for remote in remotes) - here_s
        move = self.gain_per_s * lag_s + log(FULL_LINK_FACTOR) * excess
        return self.threshold_tokens * exp(min(max(move, -limit), limit))


def _delay_s(remote: RemoteView, now_s: float) -> float:
    """Return the wait that queue and link of a cluster mean for the next prompt."""
    link = remote.link
    return max(remote.prefill.wait_s(now_s), link.backlog_bytes / link.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictive:
    """The earliest predicted first token, with what it costs others.

    Waits grow where more is sent than leaves, so under load this is a threshold too: the length from
    which on a prefill saves more there than the wait there is longer. Others pay for a prefill with its
    time, as many as are in the queue behind it, and for its bytes once the egress budget is spent.

    With an SLO, a prompt goes where it is in time. One that is in time nowhere would make others late in
    vain: it is held back until an instance is idle, if it may be.

    With a threshold and no SLO, the side of it is where a prompt goes unless the other one costs less by a margin: what
    is nearly alike is no reason to leave it, and noise in what is known makes nothing flap.
    """

    profiles: Profiles
    concern: float = CONCERN
    """How much the delay of others counts beside one's own."""
    ttft_slo_s: float | None = None
    """A first token is of use within it; None holds nothing back."""
    threshold_tokens: float | None = None
    margin_fraction: float = 0.0
    """Of the cost at the threshold's side, that another way has to save."""

    def decide(self, prompt: Prompt, view: ClustersView, now_s: float) -> Decision:
        """Return the least predicted TTFT, what it costs others added, of those in time."""
        slo_s = self.ttft_slo_s
        found = ways(
            self.profiles,
            prompt,
            view,
            now_s,
            concern=self.concern,
            max_backlog_s=inf if slo_s is None else LATE_LINK_FRACTION * slo_s,
        )
        if not found:
            return _by_side(self.profiles, prompt, view, now_s, wants_remote=True, reason="policy")
        best = _cheapest(found)
        if slo_s is None or prompt.arrived_s is None:
            return self._steady(prompt, best, found)
        left_s = SLO_MARGIN * slo_s - (now_s - prompt.arrived_s)
        if best.ttft_s <= left_s:
            return _chosen(best, found)
        in_time = [way for way in found if way.ttft_s <= left_s]
        if in_time:
            return _as(_cheapest(in_time), "within_slo")
        idle = [way for way in found if way.is_idle]
        if idle:
            return _as(_cheapest(idle), "late")
        return Decision(remote=None, reason="held", predicted_ttft_s=best.ttft_s, is_held=True)

    def _steady(self, prompt: Prompt, best: Way, found: list[Way]) -> Decision:
        """Return the decision for the cheapest way, or for the side of the threshold if that is nearly as cheap."""
        if self.threshold_tokens is not None:
            is_long = prompt.uncached_tokens > self.threshold_tokens
            usual = _cheapest(
                [way for way in found if (way.remote is not None) == is_long] or [best]
            )
            if usual.movement is None and best.cost_s >= (1 - self.margin_fraction) * usual.cost_s:
                return _as(usual, "long" if is_long else "short")
        return _chosen(best, found)


def _cheapest(found: list[Way]) -> Way:
    """Return the way of the least cost, the first one of equals: the local cluster."""
    return min(found, key=attrgetter("cost_s"))


def _as(way: Way, reason: PolicyReason) -> Decision:
    return Decision(
        remote=way.remote, reason=reason, predicted_ttft_s=way.ttft_s, movement=way.movement
    )


def _chosen(best: Way, found: list[Way]) -> Decision:
    """Return the decision for the cheapest way, and why it was not an earlier one."""
    if best.movement is not None:
        return _as(best, "moves_cache")
    if all(best.ttft_s <= way.ttft_s for way in found):
        return _as(best, "earlier")
    if best.remote is None:
        unpriced = min(way.cost_s - way.price_s for way in found if way is not best)
        return _as(best, "egress_budget" if unpriced < best.cost_s else "spares_others")
    return _as(best, "spares_others")


def own_policy(kind: Kind) -> PolicyName:
    """Return the policy that a kind of deployment stands for."""
    match kind:
        case "prfaas":
            return "static"
        case "homogeneous":
            return "local"
        case "naive":
            return "always-remote"
        case _:
            assert_never(kind)


def as_policy(name: str) -> PolicyName:
    """Return the policy of that name. Raises ValueError if there is none."""
    for policy in POLICIES:
        if policy == name:
            return policy
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")


def make_policy(
    name: PolicyName,
    *,
    profiles: Profiles,
    threshold_tokens: float,
    ttft_slo_s: float | None = None,
) -> Policy:
    """Return a policy by its name; `threshold_tokens` is t of a plan.

    `ttft_slo_s` is what `predictive` holds prompts back for; None holds none back.

    Raises:
        ValueError: a threshold that is no number, or an SLO that nothing can keep.
    """
    if isnan(threshold_tokens):
        raise ValueError("a threshold that is no number")
    if ttft_slo_s is not None and not ttft_slo_s > 0:
        raise ValueError(f"an SLO of {ttft_slo_s} s")
    match name:
        case "local":
            return Local(profiles=profiles)
        case "always-remote":
            return AlwaysRemote(profiles=profiles)
        case "static":
            return Static(profiles=profiles, threshold_tokens=threshold_tokens)
        case "threshold":
            return Threshold(profiles=profiles, threshold_tokens=threshold_tokens)
        case "predictive":
            return Predictive(profiles=profiles, ttft_slo_s=ttft_slo_s)
        case _:
            assert_never(name)
