"""Patch ``megatron.core.transformer.moe``, which contains the experts' grouped matmuls and the router.

Patches ``moe.grouped_gemm_util``, upstream's interface to the package grouped_gemm, ``moe.moe_utils``, and
the sequential experts of ``moe.experts``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import (
    NOT_FIXED,
    around,
    constant,
    installed,
    replace,
    transformer_engine_present,
)
from megatron_npu.ops.experts.grouped_matmul import grouped_matmul

_MOE = "megatron.core.transformer.moe"


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """Compute the grouped matmul of ``[t, k]`` and ``[e, k, n]``, or with ``trans_b`` of ``[t, k]`` and ``[e,
    n, k]``.

    ``batch_sizes`` is ``[e]``.

    Raises:
        NotImplementedError: ``trans_a`` is set, which megatron-core never does.
    """
    if trans_a:
        raise NotImplementedError("grouped_gemm does not support trans_a")
    return grouped_matmul(a, b.transpose(1, 2) if trans_b else b, batch_sizes)


_grouped_gemm = partial(
    constant,
    versions="<0.17",
    condition=partial(installed, "grouped_gemm"),
    why="the experts of --moe-grouped-gemm need TransformerEngine or the package grouped_gemm, which "
    "requires CUDA",
)
_grouped_gemm(f"{_MOE}.grouped_gemm_util:ops", SimpleNamespace(gmm=gmm))
_grouped_gemm(f"{_MOE}.grouped_gemm_util:grouped_gemm", SimpleNamespace(ops=SimpleNamespace(gmm=gmm)))

_router = partial(
    replace,
    f"{_MOE}.moe_utils:router_gating_linear",
    condition=transformer_engine_present,
    upstream_bug=True,
    until="0.17, which binds the name to None",
    why=(
        "upstream compares a name with None that exists only if TransformerEngine is installed, which "
        "otherwise raises a NameError"
    ),
)


@_router(versions=">=0.15,<0.17")
def router_gating_linear(
    inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype
) -> Tensor:
    """Compute the router's logits: multiply ``[..., h]`` by ``[e, h]`` in ``router_dtype``.

    Gradients have the inputs' dtypes.
    """
    bias = None if bias is None else bias.to(router_dtype)
    return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)


@_router(versions=">=0.13,<0.15")
def router_gating_linear_without_bias(inp: Tensor, weight: Tensor, router_dtype: torch.dtype) -> Tensor:
    """Compute ``router_gating_linear`` for routers without a bias (before 0.15)."""
    return F.linear(inp.to(router_dtype), weight.to(router_dtype))


@around(
    f"{_MOE}.experts:SequentialMLP.__init__",
    versions=">=0.15",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "if no ranks share an expert, autograd does not allow its output to be changed in place, but the "
        "router's share of its bias is added in place, which raises a RuntimeError"
    ),
)
def make_experts_outputs_their_own(original: Callable[..., None], self: Any, *args: Any, **kw: Any) -> None:
    """Make experts with biases return a copy of their output, which callers can change in place."""
    original(self, *args, **kw)
    if self.config.add_bias_linear:
        for expert in self.local_experts:
            expert.linear_fc2.register_forward_hook(_no_view)


def _no_view(_: Any, __: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    output, bias = result
    return (output.clone() if output._is_view() else output), bias
