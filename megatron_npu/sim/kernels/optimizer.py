"""Define a reference kernel for the fused AdamW step."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_apply_adam_w.out")
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Update ``out`` = (var, m, v) in place with an AdamW step (Loshchilov and Hutter 2019), and return it.

    ``beta1_power`` and ``beta2_power`` are beta^(t-1), the powers of the previous step: the operation itself
    multiplies them by beta. It computes in fp32.
    """
    var, m, v = out
    g = grad.float() if not maximize else -grad.float()
    momentum = beta1 * m.float() + (1 - beta1) * g
    variance = beta2 * v.float() + (1 - beta2) * g * g
    unbiased_m = momentum / (1 - beta1_power * beta1)
    unbiased_v = variance / (1 - beta2_power * beta2)
    weights = var.float()
    weights = weights - lr * unbiased_m / (unbiased_v.sqrt() + epsilon) - lr * weight_decay * weights
    for target, value in ((var, weights), (m, momentum), (v, variance)):
        target.copy_(value)
    return var, m, v
