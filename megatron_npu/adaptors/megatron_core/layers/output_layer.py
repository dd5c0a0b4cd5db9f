"""Fuse the output layer and the loss, so that the logits of all tokens are never in memory together.

On a cpu, this is faster and always done. Elsewhere it saves memory and is enabled by
``--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear``. Upstream's development branch supports
that value, but no release up to 0.19 does.

Patches ``models.gpt.gpt_model`` and ``models.common.language_module``: while a GPT computes a loss, its
output layer returns its two factors instead of the logits, and the loss is computed from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.megatron_core.layers import loss_and_embedding
from megatron_npu.adaptors.shared.layers.output_layer import loss_of_factors
from megatron_npu.ops import dispatch

_WHY = (
    "--cross-entropy-fusion-impl linear, which no release has, never stores the full logits; on a cpu, "
    "where each block of logits stays in the cache, it is always used"
)
_TOKENS_AT_ONCE = 128  # of each sample


class Factors(NamedTuple):
    """The hidden states and the output layer's weight, which are multiplied to compute the logits.

    Both are passed to the loss instead of the logits.

    Attributes:
        layer: the output layer.
        hidden: ``[s, b, h]``, or ``[s / tp, b, h]`` under sequence parallelism.
        weight: ``[v / tp, h]``, which is the layer's own or that of the embedding.
    """

    layer: Any
    hidden: Tensor
    weight: Tensor


@around("megatron.core.models.gpt.gpt_model:GPTModel.forward", why=_WHY)
def forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss without the full logits, if no other code needs them."""
    labels = args[4] if len(args) > 4 else kwargs.get("labels")
    others = kwargs.get("output_processor")  # since 0.18 the caller's own, in place of logits and loss
    if labels is None or others is not None or not self.post_process:
        return original(self, *args, **kwargs)
    gathered = args[8] if len(args) > 8 else kwargs.get("runtime_gather_output")
    if not _is_wanted(self, gathered):
        return original(self, *args, **kwargs)
    with _product_put_off(self.output_layer):
        return original(self, *args, **kwargs)


def asks_for_linear(config: Any) -> bool:
    """Return True if the flags enable the fused output layer and loss."""
    return config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear"


def _is_wanted(model: Any, runtime_gather_output: bool | None) -> bool:
    asked = asks_for_linear(model.config)
    if not asked and devices.current().name != "cpu":
        return False
    reason = _beyond(model, runtime_gather_output)
    if reason and asked:
        dispatch.report_fallback(
            "cross-entropy-fusion-impl linear",
            reason,
            "runs as native",
            "Remove --cross-entropy-fusion-impl",
        )
    return reason is None


# Flags of the configuration, and why they need the logits (use_mup since 0.17, mtp_detach_heads since 0.19).
_ASK_FOR_LOGITS = {
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute keeps the gradients of the logits",
    "use_mup": "--use-mup scales the logits",
    "mtp_detach_heads": "--mtp-detach-heads keeps gradients of some logits from the output layer",
    "config_logger_dir": "--config-logger-dir records the logits",
}


def _beyond(model: Any, runtime_gather_output: bool | None) -> str | None:
    """Return the reason why logits are needed or the output layer is not supported, or None."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = model.output_layer
    if type(layer) is not ColumnParallelLinear:
        return f"the output layer is a {type(layer).__name__}"  # sharded by FSDP, or with adapters
    return _beyond_layer(layer, runtime_gather_output) or _beyond_run(model.config)


def _beyond_layer(layer: Any, runtime_gather_output: bool | None) -> str | None:
    if layer._forward_hooks or layer._backward_hooks:  # 0.19's distillation has one
        return "a hook on the output layer receives the logits"
    if "forward" in vars(layer):  # somebody has put one around it, and expects to be asked
        return "the output layer has its own forward method"
    if layer.bias is not None:
        return "the output layer has a bias"
    if layer.gather_output or runtime_gather_output:
        return "the logits are gathered"
    if layer.disable_grad_reduce or layer.explicit_expert_comm:
        return "the output layer leaves its gradients to other code"
    if getattr(layer, "gtp_remat_size", 1) > 1:  # since 0.19
        return "several ranks share the output layer's weight"
    return None


def _beyond_run(config: Any) -> str | None:
    if torch.is_autocast_enabled(devices.current().torch_device().type):
        return "autocast selects the dtype of the matmul"
    asking = (reason for flag, reason in _ASK_FOR_LOGITS.items() if getattr(config, flag, False))
    return next(asking, None)


@contextlib.contextmanager
def _product_put_off(layer: Any) -> Iterator[None]:
    """Make ``layer`` return the factors of its matmul, instead of the product, inside the ``with`` block.

    Hooks on the layer still run.
    """
    layer.forward = functools.partial(_factors, layer)
    try:
        yield
    finally:
        del layer.forward  # the class has its own


def _factors(
    layer: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Any, None]:
    weight = layer.weight if weight is None else weight
    if weight.dtype is not input_.dtype or hasattr(weight, "__fsdp_param__"):
        return type(layer).forward(layer, input_, weight, runtime_gather_output)
    return Factors(layer, input_, weight), None


@around(
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
    why=_WHY,
)
def compute_language_model_loss(
    original: Callable[..., Tensor], self: Any, labels: Tensor, logits: Tensor | Factors
) -> Tensor:
    """Compute the fp32 loss ``[b, s]`` from labels and either the logits ``[s, b, v / tp]`` or their
    factors.
    """
    if isinstance(logits, Factors):
        layer = logits.layer
        return loss_of_factors(
            _of_all_ranks(logits),
            logits.weight,
            labels,
            group=_group(layer),
            into_main_grad=layer.gradient_accumulation_fusion,
            recompute=asks_for_linear(self.config),
        )
    if asks_for_linear(self.config):  # upstream knows native and te only
        loss = loss_and_embedding.vocab_parallel_cross_entropy(logits, labels.t().contiguous())
        return loss.t().contiguous()
    return original(self, labels, logits)


@around(
    "megatron.core.transformer.multi_token_prediction:_compute_mtp_acceptance_counts",
    versions=">=0.19",
    why=(
        "the tool asks for the likeliest next token, but the full logits are never stored, so it raised a"
        " TypeError"
    ),
)
def count_right_further_tokens(
    original: Callable[..., tuple[Tensor, Tensor]],
    mtp_logits: Tensor | Factors,
    mtp_labels: Tensor,
    loss_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Count the additional tokens ``[b, s]`` that are predicted correctly, and the total number of additional
    tokens.

    The matmul is computed again (upstream has its result), in blocks of the sequence, so that it requires no
    more memory than the loss.
    """
    if not isinstance(mtp_logits, Factors):
        return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
    with torch.no_grad():
        parts = zip(
            _of_all_ranks(mtp_logits).split(_TOKENS_AT_ONCE),
            mtp_labels.split(_TOKENS_AT_ONCE, dim=1),
            loss_mask.split(_TOKENS_AT_ONCE, dim=1),
            strict=True,
        )
        counts = [
            original(hidden @ mtp_logits.weight.t(), labels, mask, *args, **kwargs)
            for hidden, labels, mask in parts
        ]
    right, all_of_them = (torch.stack(column).sum(0) for column in zip(*counts, strict=True))
    return right, all_of_them


def _group(layer: Any) -> Any:
    from megatron.core import parallel_state

    # an argument of the layer since 0.13
    return getattr(layer, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()


def _of_all_ranks(factors: Factors) -> Tensor:
    """Gather the hidden states ``[s, b, h]`` from all tensor-parallel ranks.

    The gradient is summed over the ranks.
    """
    from megatron.core.tensor_parallel import mappings

    groups = {"group": factors.layer.tp_group} if getattr(factors.layer, "tp_group", None) else {}
    if factors.layer.sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(factors.hidden, **groups)
    if _group(factors.layer).size() == 1:
        return factors.hidden
    return mappings.copy_to_tensor_model_parallel_region(factors.hidden, **groups)
