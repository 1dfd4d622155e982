"""The scheduler of a simulated deployment: clusters as they last said they are, less those that failed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from prfaas.scheduler.dispatch import Dispatcher
from prfaas.scheduler.forecast import PrefillView, Prompt, RemoteView
from prfaas.scheduler.policies import Decision, Policy
from prfaas.scheduler.router import Outcome
from prfaas.sim.breakers import Breakers, Sent
from prfaas.sim.remote_cluster import RemoteCluster, refreshed


class Scheduling:
    """Has the dispatcher decide on what clusters reported, and hides those that their breakers refuse."""

    def __init__(self, dispatcher: Dispatcher, remotes: Sequence[RemoteCluster]) -> None:
        self._dispatcher = dispatcher
        self._remotes = remotes
        self._seen = [remote.view() for remote in remotes]
        self._breakers = Breakers([view.name for view in self._seen])
        self._refused: frozenset[int] = frozenset()
        """Clusters that the policy is not to see, by their breakers."""

    def decide(self, prompt: Prompt, local: PrefillView, now_s: float) -> Decision:
        """Return where a prompt goes; what that sets in motion counts at once."""
        if self._breakers:
            self._refuse(self._breakers.refused(now_s), has_local=local.num_instances > 0)
        for index, remote in enumerate(self._remotes):
            if remote.is_at_rest:
                self._dispatcher.saw(index, refreshed(self._shown(index), now_s))
        return self._dispatcher.decide(prompt, local=local, now_s=now_s)

    def saw(self, index: int, view: RemoteView, now_s: float) -> None:
        """Take note of a cluster's report."""
        self._seen[index] = view
        self._breakers.heard(index, now_s, is_ready=view.prefill.num_instances > 0)
        self._dispatcher.saw(index, self._shown(index))

    def sent(self, index: int, sent: Sent) -> None:
        """Take note of a remote prefill that was decided just now."""
        if self._breakers:
            self._breakers.sent(index, sent)

    def ended(
        self,
        index: int,
        prompt: Prompt,
        number: int,
        outcome: Outcome,
        now_s: float,
        here: Iterable[Sent],
    ) -> None:
        """Take note of what became of one; `here` are all that the cluster has, it among them."""
        self._breakers.ended(index, number, outcome, now_s, here)
        self._dispatcher.ended(index, prompt)

    def moved(self, prompt: Prompt, decision: Decision, now_s: float) -> None:
        """Take note that what moved before a prefill is there, or was given up."""
        self._dispatcher.moved(prompt, decision, now_s=now_s)

    def follow(self, policy: Policy) -> None:
        """Decide by another policy from now on."""
        self._dispatcher.follow(policy)

    def check(self, *, num_remote: int, num_moving_here: int) -> None:
        """Assert that what is in flight is what the dispatcher and the breakers count."""
        self._breakers.check(num_remote)
        assert self._dispatcher.num_inflight == num_remote + num_moving_here

    def _refuse(self, refused: frozenset[int], *, has_local: bool) -> None:
        """Show the policy no instance in clusters that their breakers refuse, if others can serve."""
        others = has_local or any(
            view.is_usable for index, view in enumerate(self._seen) if index not in refused
        )
        if not others:
            refused = frozenset()
        changed, self._refused = refused ^ self._refused, refused
        for index in sorted(changed):
            self._dispatcher.saw(index, self._shown(index))

    def _shown(self, index: int) -> RemoteView:
        view = self._seen[index]
        if index not in self._refused:
            return view
        return replace(view, prefill=replace(view.prefill, num_instances=0))
