"""The state around a policy: the last view of each cluster, and what was sent there since.

Work counts from the decision on, not from the next view. Each link has an egress budget that refills
at a share of what the link carries; a decision spends it, and may overdraw it by as much
as it holds.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from prfaas.scheduler.forecast import (
    ClustersView,
    LinkView,
    PrefillView,
    Profiles,
    Prompt,
    RemoteView,
)
from prfaas.scheduler.policies import MAX_EGRESS_FRACTION, Decision, Policy
from prfaas.scheduler.ways import Movement, behind

BUDGET_BURST_S = 10.0
"""The budget of so long may be spent at once."""


@dataclass(slots=True, kw_only=True)
class _Remote:
    view: RemoteView
    sent: deque[tuple[float, float]] = field(default_factory=deque)
    """(when decided, seconds of service) of what the view does not have yet."""
    sent_work_s: float = 0.0
    num_moving: int = 0
    """Prefills that go there behind their prefixes, not counted as sent before these are there."""
    moving_work_s: float = 0.0
    outgoing_bytes: float = 0.0
    """Of those prefixes."""
    backlog_bytes: float = 0.0
    budget_bytes: float | None = None
    refilled_s: float = 0.0
    prefill: PrefillView | None = None
    """As last shown; None once something of it has changed."""
    shown: RemoteView | None = None
    """The same of all of it; it holds as long as the budget is full."""


class Dispatcher:
    """Decides for each prompt, and counts at once what that sets in motion."""

    def __init__(
        self,
        policy: Policy,
        profiles: Profiles,
        *,
        remotes: tuple[RemoteView, ...] = (),
        max_egress_fraction: float = MAX_EGRESS_FRACTION,
        moves_cache: bool = False,
    ) -> None:
        """Raises ValueError for a share of the links that is none.

        `moves_cache` says whether the driver can move a prefix.
        """
        if not 0 <= max_egress_fraction <= 1:
            raise ValueError(f"{max_egress_fraction} of a link")
        self._policy = policy
        self._profiles = profiles
        self._remotes = [_Remote(view=view) for view in remotes]
        self._fraction = max_egress_fraction
        self._moves_cache = moves_cache
        self._num_inflight = 0

    def follow(self, policy: Policy) -> None:
        """Decide by another policy from now on; what is in flight stays."""
        self._policy = policy

    def saw(self, index: int, view: RemoteView) -> None:
        """Take note of a cluster as it was at `view.prefill.taken_s`.

        It had got what was decided half a round trip before.
        """
        remote = self._remotes[index]
        remote.view = view
        remote.prefill = remote.shown = None
        while remote.sent and remote.sent[0][0] <= view.prefill.taken_s - view.link.rtt_s / 2:
            remote.sent_work_s -= remote.sent.popleft()[1]

    def decide(self, prompt: Prompt, *, local: PrefillView, now_s: float) -> Decision:
        """Return where a prompt goes.

        A remote prefill is in flight until `ended`, and what moves before a prefill until `moved`.
        """
        decision = self._policy.decide(prompt, self.view(local, now_s), now_s)
        movement = decision.movement
        if decision.remote is not None:
            remote = self._remotes[decision.remote]
            work_s = self._work_s(prompt, decision.remote, movement)
            if movement is None:
                self._send(remote, work_s, now_s)
            else:
                remote.num_moving += 1
                remote.moving_work_s += work_s
                remote.outgoing_bytes += movement.num_bytes
                remote.prefill = None
            self._count(remote, self._profiles.kv_bytes(prompt))
        elif movement is not None:
            assert movement.source is not None, "it is here"
            self._count(self._remotes[movement.source], movement.num_bytes)
        return decision

    def ended(self, index: int, prompt: Prompt) -> None:
        """Take a remote prefill out of flight: it arrived, or was given up."""
        self._uncount(self._remotes[index], self._profiles.kv_bytes(prompt))

    def moved(self, prompt: Prompt, decision: Decision, *, now_s: float) -> None:
        """Take what moved before a prefill out of flight: it arrived, or was given up.

        A remote prefill stays in flight, and is on its way there from now on.
        """
        movement = decision.movement
        assert movement is not None, "nothing moved"
        if decision.remote is None:
            assert movement.source is not None, "it was here"
            self._uncount(self._remotes[movement.source], movement.num_bytes)
            return
        remote = self._remotes[decision.remote]
        work_s = self._work_s(prompt, decision.remote, movement)
        remote.num_moving -= 1
        remote.moving_work_s = remote.moving_work_s - work_s if remote.num_moving else 0.0
        left_bytes = max(0.0, remote.outgoing_bytes - movement.num_bytes)
        remote.outgoing_bytes = left_bytes if remote.num_moving else 0.0
        self._send(remote, work_s, now_s)

    @property
    def num_inflight(self) -> int:
        """Return what has been decided to come over a link and has not ended."""
        return self._num_inflight

    def view(self, local: PrefillView, now_s: float) -> ClustersView:
        """Return what a policy would look at now."""
        return ClustersView(
            local=local,
            remotes=tuple([self._now(remote, now_s) for remote in self._remotes]),
            moves_cache=self._moves_cache,
        )

    def _work_s(self, prompt: Prompt, index: int, movement: Movement | None) -> float:
        if movement is not None:
            prompt = behind(prompt, movement, index)
        return self._profiles.remote_work_s(prompt, index)

    def _send(self, remote: _Remote, work_s: float, now_s: float) -> None:
        """Count work as on its way to a cluster, until a report has it."""
        remote.sent.append((now_s, work_s))
        remote.sent_work_s += work_s
        remote.prefill = remote.shown = None

    def _count(self, remote: _Remote, num_bytes: float) -> None:
        """Count bytes that will come from a cluster, and spend its budget on them."""
        remote.backlog_bytes += num_bytes
        remote.shown = None
        self._num_inflight += 1
        if remote.budget_bytes is not None:
            remote.budget_bytes -= num_bytes

    def _uncount(self, remote: _Remote, num_bytes: float) -> None:
        self._num_inflight -= 1
        remote.backlog_bytes = max(0.0, remote.backlog_bytes - num_bytes)
        remote.shown = None
        if not self._num_inflight:
            for each in self._remotes:
                each.backlog_bytes = 0.0  # rounding must not add up
                each.shown = None

    def _now(self, remote: _Remote, now_s: float) -> RemoteView:
        shown = remote.shown
        if shown is not None and shown.link.budget_bytes == shown.link.budget_limit_bytes:
            remote.refilled_s = now_s
            return shown
        link = remote.view.link
        rate = self._fraction * link.bytes_per_s
        limit_bytes = BUDGET_BURST_S * rate
        if remote.budget_bytes is None:
            remote.budget_bytes = limit_bytes
        refilled = remote.budget_bytes + rate * (now_s - remote.refilled_s)
        remote.budget_bytes = max(-limit_bytes, min(refilled, limit_bytes))
        remote.refilled_s = now_s
        if remote.prefill is None:
            remote.prefill = replace(
                remote.view.prefill,
                num_sent=len(remote.sent) + remote.num_moving,
                sent_work_s=max(0.0, remote.sent_work_s + remote.moving_work_s),
            )
        remote.shown = RemoteView(
            name=remote.view.name,
            prefill=remote.prefill,
            link=LinkView(
                bytes_per_s=link.bytes_per_s,
                rtt_s=link.rtt_s,
                backlog_bytes=remote.backlog_bytes,
                outgoing_backlog_bytes=remote.outgoing_bytes,
                egress_bytes_per_s=link.egress_bytes_per_s,
                budget_bytes=remote.budget_bytes,
                budget_limit_bytes=limit_bytes,
                budget_bytes_per_s=rate,
            ),
        )
        return remote.shown
