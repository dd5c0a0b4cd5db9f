"""Give megatron-core's checkpoints access to a model's weights without a second copy in memory.

megatron-core splits some parameters, such as the halves of a gated MLP, into several tensors of a checkpoint.
megatron-core clones each of these views when writing, and concatenates new tensors after reading, which
requires additional memory for half of a Llama model.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def read_in_place(wanted: dict[str, Any]) -> None:
    """Read a checkpoint directly into views of the parameters, instead of concatenating the parts afterwards.

    Args:
        wanted: the result of a model's ``sharded_state_dict``; changed in place.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    for entry in nested_values(wanted):
        if isinstance(entry, ShardedTensorFactory):
            entry.merge_fn = functools.partial(_whole, entry.data, entry.merge_fn)


def _whole(parameter: Tensor, merge: Callable[[Any], Tensor], parts: Any) -> Tensor:
    """Return the parameter itself if all parts are views of its memory, and the merged parts otherwise."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    home = _memory(parameter)
    inside = all(_memory(part) == home for part in nested_values(parts))
    return parameter if inside else merge(parts)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GivenAway:
    """A model that is not used after saving, so that its parameters can be moved into the checkpoint.

    Pass it to the saving functions instead of the model.

    Args:
        model: a megatron-core model on the host.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the model's parameters."""
        return self._model.parameters()

    def sharded_state_dict(self, *, metadata: Any = None) -> dict[str, Any]:
        """Return the model's ``sharded_state_dict``, in which each tensor has its own memory."""
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
