"""Stub for ``transformer_engine.pytorch.ops``, which provides activation functions as modules.

Fused chains of operations are rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.ops import activation


class FusibleOperation(torch.nn.Module):
    """Base class of the operations."""


class _Activation(FusibleOperation):
    """Activation function without parameters, from ``[..., h]`` (``[..., 2h]`` if gated) to ``[..., h]``."""

    function: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation function of this class."""
        return type(self).function(input)


class GELU(_Activation):
    """GELU in its tanh form."""

    function = staticmethod(activation.bias_gelu)


class GEGLU(_Activation):
    """Gated activation ``gelu(a) * b``, with GELU in its tanh form."""

    function = staticmethod(activation.geglu)


class SwiGLU(_Activation):
    """Gated activation ``silu(a) * b``."""

    function = staticmethod(activation.swiglu)


class SiLU(_Activation):
    """Activation function ``silu(a)``."""

    function = staticmethod(F.silu)


class ReLU(_Activation):
    """Activation function ``relu(a)``."""

    function = staticmethod(F.relu)


def _reglu(input: Tensor) -> Tensor:
    gate, value = input.chunk(2, -1)
    return F.relu(gate) * value


class ReGLU(_Activation):
    """Gated activation ``relu(a) * b``."""

    function = staticmethod(_reglu)


class Sequential(FusibleOperation):
    """A sequence of operations that TransformerEngine fuses.

    Raises:
        UsageError: it is instantiated.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "use_te_op_fuser requires TransformerEngine, which is not installed; the MLP that is built from the "
        "layers provided here already has a fused norm, matmul and activation. Remove use_te_op_fuser "
        "(--use-transformer-engine-op-fuser)."
    )
