"""A model's weights as megatron-core's checkpoints use them, without a second copy in memory.

megatron-core cuts some parameters, such as both halves of a gated MLP, into several tensors of a checkpoint.
It clones each of these views to write it, and puts new ones together when it has read them: of a Llama that
is half the model.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def read_in_place(wanted: dict[str, Any]) -> None:
    """Let what is read into views of a parameter be the parameter, and not be put together again.

    Args:
        wanted: what ``sharded_state_dict`` of a model has returned; changed.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    for entry in nested_values(wanted):
        if isinstance(entry, ShardedTensorFactory):
            entry.merge_fn = functools.partial(_whole, entry.data, entry.merge_fn)


def _whole(parameter: Tensor, merge: Callable[[Any], Tensor], parts: Any) -> Tensor:
    """Return the parameter if all parts lie in its memory, else what ``merge`` makes of them."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    home = _memory(parameter)
    inside = all(_memory(part) == home for part in nested_values(parts))
    return parameter if inside else merge(parts)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GivenAway:
    """A model that is of no use once it is saved: parameters that are cut are given to the checkpoint.

    It stands for the model where one is saved.

    Args:
        model: of megatron-core, on the host.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the model's."""
        return self._model.parameters()

    def sharded_state_dict(self, *, metadata: Any = None) -> dict[str, Any]:
        """Return what the model's method does, every tensor in memory of its own."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

        content = self._model.sharded_state_dict(metadata=metadata)
        apply_factories(content)
        views: dict[int, list[Any]] = defaultdict(list)
        for entry in nested_values(content):
            if isinstance(entry, ShardedTensor) and _is_view(entry.data):
                views[_memory(entry.data)].append(entry)
        for parameter in self._model.parameters():
            cut = views.pop(_memory(parameter), [])
            for entry in cut:
                entry.data = entry.data.clone()
            if cut:
                parameter.data = parameter.data.new_empty(0)
        return content


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
