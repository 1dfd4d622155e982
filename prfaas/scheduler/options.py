"""When a prefill goes to the peer."""

from dataclasses import dataclass

from prfaas.scheduler.policies import MAX_EGRESS_FRACTION, PolicyName
from prfaas.scheduler.rebalancer import RebalanceOptions

FIRST_THRESHOLD_TOKENS = 512
"""t as long as nothing is known that says better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of the `[scheduler]` section."""

    policy: PolicyName | None = None
    """None: `static` with a number for t, else `predictive`."""
    threshold_tokens: int | None = None
    """t of PrfaaS §3.4: uncached prompts longer than this are prefilled by the peer. None: it follows what is
    observed."""
    egress_target: float = MAX_EGRESS_FRACTION
    """Share of the link that planned KVCache may fill."""
    rebalance_period_s: float = 60.0
    """Between two looks of the long time scale."""
    rebalance_dwell_s: float = 300.0
    """Between two changes of a role, or of an engine's share, at least."""
    rebalance_prompts: int = 2_000
    """The last ones are what it solves for."""
    placement_timeout_s: float = 30.0
    """A scheduler keeps a request for so long while no node can take it but one may be back."""

    @property
    def policy_in_force(self) -> PolicyName:
        """Return the policy that these options mean."""
        if self.policy is not None:
            return self.policy
        return "predictive" if self.threshold_tokens is None else "static"

    @property
    def rebalance(self) -> RebalanceOptions:
        """Return what these options say of the long time scale."""
        return RebalanceOptions(
            period_s=self.rebalance_period_s,
            dwell_s=self.rebalance_dwell_s,
            num_prompts=self.rebalance_prompts,
        )

    @property
    def first_threshold_tokens(self) -> int:
        """Return t before anything was observed."""
        return FIRST_THRESHOLD_TOKENS if self.threshold_tokens is None else self.threshold_tokens
