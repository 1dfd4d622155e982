"""The feed-forward part of a layer; torch-free."""

from dataclasses import dataclass
from typing import Literal

from prfaas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A dense feed-forward."""

    intermediate_size: int
    is_gated: bool = True
    """act(gate) * up; else act(up) alone (Nemotron-H)."""
    has_bias: bool = False
    gate_scale: float = 1.0
    """Multiplies the gate (Falcon-H1)."""
    down_scale: float = 1.0
    """Multiplies the output (Falcon-H1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Routed experts, and one shared part that every token takes."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    shared_size: int = 0
    """Intermediate size of the shared part; 0: none."""
    has_shared_gate: bool = False
    """The shared part is multiplied by a learnt sigmoid (Qwen)."""
    router: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    """Scores: softmax over all experts, sigmoids with a selection bias, softmax over the chosen."""
    is_renormalised: bool = True
    """The chosen experts' scores are divided by their sum."""
    routed_scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are chosen from this many of num_groups groups (DeepSeek)."""
    is_gated: bool = True
    has_bias: bool = False
    """Router and experts add one (gpt-oss)."""
    latent_size: int | None = None
    """Experts work on a projection of this width (Nemotron-H)."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a choice that there is not."""
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts are not in {self.num_groups} equal groups"
            )
        if not 1 <= self.groups_per_token <= self.num_groups:
            raise ConfigError(
                f"{self.groups_per_token} of {self.num_groups} groups of experts a token"
            )
        selectable = self.groups_per_token * self.num_experts // self.num_groups
        if not 1 <= self.experts_per_token <= selectable:
            raise ConfigError(
                f"{self.experts_per_token} experts a token, of {selectable} that can be chosen"
            )


FfnSpec = MlpSpec | MoeSpec
