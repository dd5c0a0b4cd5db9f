"""Support ``--tp-comm-overlap`` on an NPU, with matmuls that are fused with their communication.

The fused matmuls are used in place of TransformerEngine's buffers. Patches ``tensor_parallel.layers`` and
``transformer.transformer_config`` of ``megatron.core``, and ``megatron.training.initialize``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, replace, transformer_engine_present
from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch
from megatron_npu.ops.products import parallel_linear
from megatron_npu.ops.products.weight_gradient import accumulate_weight_gradient

_overlapped = partial(
    around,
    devices=("npu",),
    why="--tp-comm-overlap: upstream's own layers wait for their collective, but torch_npu fuses it with "
    "the matmul" + LAUNCHES_COUNTED,
)


@_overlapped("megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward")
def overlapped_column(
    original: Callable[..., tuple],
    self: Any,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a column-parallel layer while gathering its input: map ``[s / tp, b, h]`` to ``[s, b, h_out
    / tp]``.
    """
    factor = self.weight if weight is None else weight
    deferred = self.config.defer_embedding_wgrad_compute and self.grad_output_buffer is not None
    if deferred or not _asked(self, "tp_comm_overlap_ag") or not _taken(self, factor):
        return original(self, input_, weight, runtime_gather_output)
    output = parallel_linear.gathered_linear(input_, factor, _group(self), _weight_gradient(self, factor))
    return _with_bias(self, output)


@_overlapped("megatron.core.tensor_parallel.layers:RowParallelLinear.forward")
def overlapped_row(original: Callable[..., tuple], self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute a row-parallel layer while scattering its output: map ``[s, b, h_in / tp]`` to ``[s / tp,
    b, h]``.
    """
    if not _asked(self, "tp_comm_overlap_rs") or not _taken(self, self.weight):
        return original(self, input_)
    gradient = _weight_gradient(self, self.weight)
    return _with_bias(self, parallel_linear.scattered_linear(input_, self.weight, _group(self), gradient))


def _asked(layer: Any, kind: str) -> bool:
    """Return True if the flags request overlapped communication for a layer.

    ``kind`` is the option for gathering or scattering.
    """
    config = layer.config
    return (
        config.tp_comm_overlap and getattr(config, kind) and layer.sequence_parallel and not layer.is_expert
    )


def _taken(layer: Any, weight: Tensor) -> bool:
    """Return True if the fused operations support a layer.

    Otherwise, report that they do not.

    Raises:
        FallbackForbiddenError: the operations do not support the layer, and strict mode is enabled.
    """
    reason = parallel_linear.beyond(weight, _group(layer).size())
    if reason is None and hasattr(weight, "__fsdp_param__"):
        reason = "Megatron's FSDP collects weight gradients itself"
    if reason:
        dispatch.report_fallback(
            "tp-comm-overlap", reason, "is ignored for a layer", "Remove --tp-comm-overlap"
        )
    return reason is None


def _group(layer: Any) -> torch.distributed.ProcessGroup:
    """Return a layer's tensor-parallel group.

    Up to 0.12, layers do not store it.
    """
    from megatron.core import parallel_state

    return getattr(layer, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()


def _with_bias(layer: Any, output: Tensor) -> tuple[Tensor, Tensor | None]:
    if layer.skip_bias_add or layer.bias is None:
        return output, layer.bias
    return output + layer.bias, None


def _weight_gradient(layer: Any, weight: Any) -> parallel_linear.WeightGradient:
    """Return the function that computes the gradient of a layer's weight.

    Like upstream, the function accumulates into the weight's gradient buffer if there is one.
    """

    def into_buffer(input: Tensor, grad: Tensor) -> Tensor | None:
        accumulate_weight_gradient(input, grad, weight.main_grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # What autograd is given instead: it runs the hooks that reduce the buffer.
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(weight.shape, dtype=input.dtype, device=input.device)

    if layer.gradient_accumulation_fusion and hasattr(weight, "main_grad"):
        return into_buffer
    return lambda input, grad: grad.t() @ input


@around(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    devices=("npu",),
    condition=transformer_engine_present,
    why="--tp-comm-overlap with a number of ranks or a dtype that no kernel supports would overlap nothing",
    order=1,
)
def configure_overlap(original: Callable[[Any], None], self: Any) -> None:
    """Reject a configuration in which no layer is able to overlap its communication with computation."""
    refuse_no_overlap(self)
    original(self)


def refuse_no_overlap(config: Any) -> None:
    """Check that an NPU can apply the ``--tp-comm-overlap`` option of a ``TransformerConfig``.

    Raises:
        UsageError: the option cannot have any effect.
    """
    if not config.tp_comm_overlap:
        return
    size = config.tensor_model_parallel_size
    if size not in parallel_linear.RANKS:
        raise UsageError(
            "--tp-comm-overlap requires --tensor-model-parallel-size 2, 4 or 8 on an NPU, because "
            f"torch_npu's matmul-communication kernels support only these sizes, but got {size}. Remove "
            "--tp-comm-overlap."
        )
    if not config.sequence_parallel:
        raise UsageError(
            "--tp-comm-overlap requires --sequence-parallel, because it overlaps the gathering and "
            "scattering of the sequence with matmuls. Add --sequence-parallel, or remove --tp-comm-overlap."
        )
    if config.params_dtype is torch.float32:
        raise UsageError(
            "--tp-comm-overlap requires --bf16 or --fp16 on an NPU, because torch_npu's "
            "matmul-communication kernels support only 16-bit types. Remove --tp-comm-overlap."
        )


def refuse_arguments(args: Any) -> None:
    """Check a script's ``--tp-comm-overlap`` before upstream parses its arguments.

    Raises:
        UsageError: the option cannot have any effect.
    """
    dtype = None if args.bf16 or args.fp16 else torch.float32
    values = {name: getattr(args, name) for name in ("tp_comm_overlap", "sequence_parallel")}
    size = args.tensor_model_parallel_size
    refuse_no_overlap(SimpleNamespace(**values, tensor_model_parallel_size=size, params_dtype=dtype))


@replace(
    "megatron.training.initialize:_initialize_tp_communicators",
    devices=("npu",),
    condition=transformer_engine_present,
    why="upstream creates TransformerEngine's buffers, which torch_npu's kernels do not need",
)
def without_buffers() -> None:
    """Create no buffers, because the matmuls use the communicator of the tensor-parallel group."""
