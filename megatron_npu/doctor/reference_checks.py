"""Operations that verify mode does not reach, each against its formula in fp32 on the host.

Each function returns pairs: what our operation gave, and what it should have given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.cross_entropy import vocab_parallel_cross_entropy
from megatron_npu.ops.dropout import bias_dropout_add
from megatron_npu.ops.multi_tensor import multi_tensor_l2norm, multi_tensor_scale
from megatron_npu.ops.weight_gradient import accumulate_weight_gradient

Make = Callable[..., Tensor]
Pairs = list[tuple[Tensor, Tensor]]


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()


def _cross_entropy(make: Make) -> Pairs:
    logits = make(32, 2, 500)
    target = torch.arange(64).view(32, 2) * 7
    right = _host(logits).requires_grad_()
    loss = F.cross_entropy(right.view(64, 500), target.view(64), reduction="none").view(32, 2)
    loss.sum().backward()
    given = logits.detach().clone().requires_grad_()  # its memory becomes the gradient's
    ours = vocab_parallel_cross_entropy(given, target.to(logits.device), vocab_start=0, vocab_size=500)
    ours.sum().backward()
    return [(ours.cpu(), loss.detach()), (_host(given.grad), right.grad)]


def _weight_gradient(make: Make) -> Pairs:
    input, grad = make(64, 48).detach(), make(64, 32).detach()
    buffer = torch.ones(32, 48, device=input.device)
    accumulate_weight_gradient(input, grad, buffer)
    return [(buffer.cpu(), 1 + _host(grad).t() @ _host(input))]


def _multi_tensor(make: Make) -> Pairs:
    x, y = make(33, 65).detach(), make(33, 65).detach()
    overflow = torch.zeros(1, dtype=torch.int, device=x.device)
    norm, _ = multi_tensor_l2norm(2048, overflow, [[x, y]])
    scaled = torch.empty_like(x)
    multi_tensor_scale(2048, overflow, [[x], [scaled]], 0.5)
    both = torch.cat([_host(x), _host(y)])
    return [
        (norm.cpu(), both.norm().view(1)),
        (_host(scaled), 0.5 * _host(x)),
        (_host(overflow), torch.zeros(1)),
    ]


def _dropout(make: Make) -> Pairs:
    """Kept values are scaled by 1 / (1 - p), the others are the residual; a quarter of them is dropped."""
    x, bias, residual = make(128, 256), make(256), make(128, 256)
    ours = _host(bias_dropout_add(x, bias, residual, 0.25, True))
    kept, dropped = _host(residual) + (_host(x) + _host(bias)) / 0.75, _host(residual)
    nearest = torch.where((ours - kept).abs() < (ours - dropped).abs(), kept, dropped)
    share = (nearest == dropped).float().mean()
    # 32,768 decisions: the standard deviation of the share is 0.0024
    assert abs(share - 0.25) < 0.015, f"{share:.3f} of the values were dropped instead of 0.25"
    return [(ours, nearest)]


CHECKS: dict[str, Callable[[Make], Pairs]] = {
    "vocab_parallel_cross_entropy": _cross_entropy,
    "accumulate_weight_gradient": _weight_gradient,
    "multi_tensor": _multi_tensor,
    "bias_dropout_add": _dropout,
}
