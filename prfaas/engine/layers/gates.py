"""Gates of mixers, experts and heads: on a CPU by our own kernels, else by torch's."""

from torch import Tensor

from prfaas.engine.native import activations


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) as new memory."""
    return activations.activated("sigmoid", x) if x.is_cpu else x.sigmoid()


def multiply_by_gate(out_TF: Tensor, gate_TF: Tensor) -> None:
    """Multiply the rows by the sigmoid of the gates, in place."""
    if out_TF.is_cpu:
        activations.multiply_by_gate(out_TF, gate_TF)
    else:
        out_TF.mul_(gate_TF.sigmoid())


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) as a new contiguous tensor; nothing overflows."""
    return x.abs().neg_().contiguous().exp_().log1p_().add_(x.clamp(min=0.0))
