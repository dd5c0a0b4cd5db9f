"""``megatron.core.tensor_parallel.layers``: the embedding, and weights initialised on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import wrap
from megatron_npu.ops.embedding import vocab_parallel_embedding


@wrap(
    "megatron.core.tensor_parallel.layers:_initialize_affine_weight_cpu",
    devices=("cpu",),
    why="--use-cpu-initialization draws from the host's generator; on a cpu the default one is the device's",
)
def initialize_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Draw the whole weight from the host's generator, the same on every tensor-parallel rank."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with devices.current().host_rng():
            return original(*args, **kwargs)

    return initialize


@wrap(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    why="upstream indexes with boolean masks, whose size the host has to wait for on npu and cuda; on a cpu "
    "torch adds the gradients of a frequent token up in 16 bits",
)
def embed_without_waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Look up, then combine the parts as upstream does; its deterministic mode keeps its own lookup."""

    @functools.wraps(original)
    def forward(self: Any, input_: Tensor) -> Tensor:
        if self.deterministic_mode:
            return original(self, input_)
        from megatron.core.tensor_parallel import mappings

        group = getattr(self, "tp_group", None)  # an argument since 0.13
        part = vocab_parallel_embedding(
            input_,
            self.weight,
            self.vocab_start_index,
            self.vocab_end_index,
            split=self.weight.size(0) != self.num_embeddings,
        )
        groups = {} if group is None else {"group": group}
        if self.reduce_scatter_embeddings:  # [b, s, h] to this rank's [s / tp, b, h]
            return mappings.reduce_scatter_to_sequence_parallel_region(
                part.transpose(0, 1).contiguous(), **groups
            )
        return mappings.reduce_from_tensor_model_parallel_region(part, **groups)

    return forward
