"""The feed-forward of routed experts, and the shared part that every token takes.

A row's bits depend on itself alone: its experts are chosen from its own scores, and their outputs are
added in ascending order of expert.

Shapes: T tokens, D model dim, E experts, K experts of a token, P rows of all experts, G groups of
experts.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from prfaas.engine.ffn_spec import MoeSpec
from prfaas.engine.layers.gates import sigmoid
from prfaas.engine.linear import Linear
from prfaas.engine.native.experts import SMALLEST_SUM, choose_experts
from prfaas.engine.recorder import by_value

EXPERTS_PER_GROUP_SCORE = 2
"""A group is as good as its best two experts together (DeepSeek-V3)."""


class MoeMlp:
    """The weighted sum of each token's experts, plus the shared part."""

    def __init__(
        self,
        spec: MoeSpec,
        *,
        router: Linear,
        selection_bias_E: Tensor | None,
        experts: Sequence[Callable[[Tensor], Tensor]],
        shared: Callable[[Tensor], Tensor] | None,
        shared_gate: Linear | None,
        latent_in: Linear | None,
        latent_out: Linear | None,
    ) -> None:
        """Make the layer.

        Args:
            spec: how experts are chosen and weighted.
            router: x_TD -> scores [T, E], before a softmax or sigmoid.
            selection_bias_E: joins the scores for the choice, not for the weights.
            experts: each takes and returns rows.
            shared: the part that every token takes.
            shared_gate: x_TD -> [T, 1], whose sigmoid multiplies the shared part.
            latent_in: projects what the experts take; None: they take x_TD.
            latent_out: projects the experts' weighted sum.
        """
        self.spec = spec
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.latent_in = latent_in
        self.latent_out = latent_out
        self._selection_bias_E = selection_bias_E

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the output rows."""
        logits_TE = self.router(x_TD)
        latent_TD = x_TD if self.latent_in is None else self.latent_in(x_TD)
        routed_TD = latent_TD.new_empty(latent_TD.shape)

        def mix() -> None:
            self._mix(latent_TD, *self.choose(logits_TE), routed_TD.zero_())

        by_value(mix)
        if self.latent_out is not None:
            routed_TD = self.latent_out(routed_TD)
        if self.shared is None:
            return routed_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = shared_TD * sigmoid(self.shared_gate(x_TD))
        return routed_TD.add_(shared_TD)

    def choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, [T, K] both, best first."""
        spec = self.spec
        if logits_TE.is_cpu:
            return choose_experts(logits_TE, self._selection_bias_E, spec)
        selection_TE = scores_TE = self._scores(logits_TE)
        if self._selection_bias_E is not None:
            selection_TE = scores_TE + self._selection_bias_E
        if spec.num_groups > spec.groups_per_token:
            selection_TE = self._in_best_groups(selection_TE)
        chosen_TK = selection_TE.topk(spec.experts_per_token, dim=-1).indices
        weights_TK = scores_TE.gather(-1, chosen_TK)
        if spec.router == "top_softmax":
            weights_TK = torch.softmax(weights_TK, dim=-1)
        elif spec.is_renormalised:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True).add_(SMALLEST_SUM)
        return chosen_TK, weights_TK.mul_(spec.routed_scale)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        match self.spec.router:
            case "softmax":
                return torch.softmax(logits_TE, dim=-1)
            case "sigmoid":
                return sigmoid(logits_TE)
            case "top_softmax":
                return logits_TE
            case other:
                assert_never(other)

    def _in_best_groups(self, selection_TE: Tensor) -> Tensor:
        """Return the scores, -inf outside of each token's groups."""
        spec = self.spec
        selection_TGE = selection_TE.view(len(selection_TE), spec.num_groups, -1)
        num_best = min(EXPERTS_PER_GROUP_SCORE, selection_TGE.shape[-1])
        groups_TG = selection_TGE.topk(num_best, dim=-1).values.sum(dim=-1)
        best_TG = groups_TG.topk(spec.groups_per_token, dim=-1).indices
        is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, best_TG, value=False)
        return selection_TGE.masked_fill(is_out_TG[..., None], float("-inf")).flatten(1)

    def _mix(self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, mixed_TD: Tensor) -> None:
        """Add the weighted sums of the experts' outputs to `mixed_TD`."""
        chosen = chosen_TK.cpu().numpy().ravel()
        order = np.argsort(chosen, kind="stable")  # by expert, then by token
        counts_E = np.bincount(chosen)
        hit = counts_E.nonzero()[0].tolist()
        order_P = torch.from_numpy(order).to(x_TD.device)
        owners_P = order_P // chosen_TK.shape[1]
        pieces = torch.split(x_TD[owners_P], counts_E[hit].tolist())
        outs = [self.experts[expert](piece) for expert, piece in zip(hit, pieces, strict=True)]
        out_PD = torch.cat(outs).mul_(weights_TK.view(-1, 1)[order_P])
        mixed_TD.index_add_(0, owners_P, out_PD)  # in their order: expert by expert
