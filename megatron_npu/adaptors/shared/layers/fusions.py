"""Replace elementwise layer functions that the older checkouts compile with TorchScript's fusers."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.adaptors.shared.layers import residual_norms
from megatron_npu.ops import activation
from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.ops.dropout import bias_dropout_add
from megatron_npu.patching.registry import Recorder

_NO_BIAS = "megatron_npu_no_bias"

COMPILED_ANEW = (
    "upstream makes three passes; TorchScript compiles the function again in every process and rounds"
    " bf16 differently until it is compiled, so that a resumed run would not be bitwise identical to "
    "the interrupted one"
)


def connect(recorder: Recorder) -> None:
    """Record patches for bias-GELU and bias-dropout-add, which both checkouts define identically.

    Args:
        recorder: the checkout's recorder.
    """
    recorder.constant(
        "megatron.model.fused_bias_gelu:bias_gelu_impl",
        bias_gelu_impl,
        why=(
            "upstream makes eight element-wise passes forward and more backward; nvfuser, which fused "
            "these passes, no longer exists"
        ),
    )
    transformer = "megatron.model.transformer"
    recorder.replace(f"{transformer}:bias_dropout_add_fused_train", why=COMPILED_ANEW)(
        bias_dropout_add_fused_train
    )
    recorder.replace(f"{transformer}:bias_dropout_add_fused_inference", why=COMPILED_ANEW)(
        bias_dropout_add_fused_inference
    )


def connect_gelu(recorder: Recorder) -> None:
    """Record patches for the two GELU functions that Megatron-DeepSpeed compiles for models without the
    fused GELU.
    """
    recorder.replace("megatron.model.utils:gelu_impl", why=COMPILED_ANEW)(gelu_impl)
    recorder.replace("megatron.model.utils:erf_gelu", why=COMPILED_ANEW)(erf_gelu)


def no_bias(bias: Tensor) -> Tensor:
    """Return zero in place of a bias that has already been added.

    The functions of this module skip this value.
    """
    return _nothing(bias.dtype, bias.device)


@lru_cache_tensors(maxsize=8)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    zero = torch.zeros(1, dtype=dtype, device=device)
    setattr(zero, _NO_BIAS, True)
    return zero


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``gelu(input + bias)`` in tanh form, for ``[s, b, h]`` and a bias ``[h]``."""
    return activation.bias_gelu(input, None if getattr(bias, _NO_BIAS, False) else bias)


def gelu_impl(x: Tensor) -> Tensor:
    """Return ``gelu(x)`` in tanh form (Hendrycks and Gimpel 2016)."""
    return activation.bias_gelu(x)


def erf_gelu(x: Tensor) -> Tensor:
    """Return ``gelu(x)`` in exact (erf) form.

    Upstream rounds the square root of 2 to five decimals.
    """
    return activation.gelu(x)


def bias_dropout_add_fused_train(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
    """Return ``residual + dropout(x + bias)``, where all tensors are ``[s, b, h]``.

    With prob 0, no random numbers are drawn.
    """
    return _bias_dropout_add(x, bias, residual, prob, True)


def bias_dropout_add_fused_inference(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
    """Return ``residual + x + bias``, where all tensors are ``[s, b, h]``."""
    return _bias_dropout_add(x, bias, residual, prob, False)


def _bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool
) -> Tensor:
    x, bias = _with_vector(x, bias)
    norm = residual_norms.next_reader()
    if norm is not None and training:
        total = residual_norms.add(x, bias, residual, prob, norm)
        if total is not None:
            return total
    return bias_dropout_add(x, bias, residual, prob, training)


def _with_vector(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return ``x``, and the bias as a vector ``[h]`` or as None.

    Upstream passes a bias expanded to ``[s, b, h]``.
    """
    if bias is None:  # without biases, in deepspeedai's tree
        return x, None
    base = bias._base
    if getattr(base, _NO_BIAS, False):
        return x, None
    # the base is the parameter [h] itself
    if base is not None and base.shape == bias.shape[-1:] and not any(bias.stride()[:-1]):
        return x, base
    return x + bias, None
