"""Fix modules that use the global tensor-parallel group although they are given another group.

Patches ``megatron.core.transformer``, ``models.gpt`` and ``models.multimodal``. If both are the same group,
as in every stock script, nothing changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import backport
from megatron_npu.base.object_view import View

_UNTIL = "not fixed up to 0.19.2, #7452/{}"


@contextlib.contextmanager
def _with(module: str, name: str, **others: Any) -> Iterator[None]:
    """Override the names in ``others``, inside the ``with`` block, in the object to which ``name`` refers
    in ``module``.
    """
    holder = importlib.import_module(module)
    kept = getattr(holder, name)
    setattr(holder, name, View(kept, **others))
    try:
        yield
    finally:
        setattr(holder, name, kept)


_MTP = "megatron.core.transformer.multi_token_prediction"


@backport(
    f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward",
    versions=">=0.17",
    until=_UNTIL.format(4),
    why="a layer of --mtp-num-layers that was given its own tensor-parallel group recomputes distributed "
    "FP8 activations from the global group, that is, from other replicas",
)
def recompute_in_own_group(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Recompute activations with the tensor-parallel group that the layer was given."""
    if self.tp_group is None:
        return original(self, *args, **kwargs)
    with _with(_MTP, "parallel_state", get_tensor_model_parallel_group=lambda *_, **__: self.tp_group):
        return original(self, *args, **kwargs)


_GPT = "megatron.core.models.gpt.gpt_model"
_LLAVA = "megatron.core.models.multimodal.llava_model"


@backport(
    f"{_GPT}:GPTModel._preprocess",
    versions=">=0.16",
    until=_UNTIL.format(5),
    why="with sequence parallelism, a GPTModel that was given its own tensor-parallel group scatters its "
    "experts' padding mask over the ranks of the global group",
)
def deal_out_padding(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Scatter the padding mask over the ranks of the model's group."""
    return _dealt(_GPT, self.pg_collection.tp, original, self, *args, **kwargs)


@backport(
    f"{_LLAVA}:LLaVAModel._process_embedding_token_parallel",
    versions=">=0.14",
    until=_UNTIL.format(7),
    why="with sequence parallelism, a LLaVAModel that was given its own tensor-parallel group scatters its "
    "sequences over the ranks of the global group, so that it trains on tokens of other samples",
)
def deal_out_embeddings(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Scatter the embeddings over the ranks of the model's group."""
    groups = getattr(self, "pg_collection", None) or self.model_comm_pgs  # 0.14
    return _dealt(_LLAVA, groups.tp, original, self, *args, **kwargs)


def _dealt(module: str, group: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core import tensor_parallel

    scatter = tensor_parallel.scatter_to_sequence_parallel_region

    def dealt(tensor: Tensor, group: Any = group) -> Tensor:
        return scatter(tensor, group=group)

    with _with(module, "tensor_parallel", scatter_to_sequence_parallel_region=dealt):
        return original(*args, **kwargs)


_crossed = partial(
    backport,
    "megatron.core.transformer.attention:CrossAttention.__init__",
    until=_UNTIL.format(6),
    why="a CrossAttention that was given its own tensor-parallel group computes queries, keys and values in "
    "the global group: with sequence parallelism it gathers tokens of other replicas",
)


@_crossed(versions=">=0.16")
def project_in_own_group(
    original: Callable[..., None], self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    """Pass the model's process group to the layers that project the inputs of a CrossAttention.

    Upstream passes it only to the third layer.
    """
    given = inspect.signature(original).bind(self, config, submodules, *args, **kwargs).arguments
    groups = given.get("pg_collection")
    original(self, config, _in_group(submodules, groups, partial), *args, **kwargs)


@_crossed(versions=">=0.13,<0.16")
def specify_in_own_group(
    original: Callable[..., None], self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    """Pass the process group to the layers that project the inputs of a CrossAttention, which versions up
    to 0.15 define as specs or classes.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    def specified(layer: Any, **more: Any) -> Any:
        spec = layer if isinstance(layer, ModuleSpec) else ModuleSpec(layer)
        return dataclasses.replace(spec, params={**spec.params, **more})

    given = inspect.signature(original).bind(self, config, submodules, *args, **kwargs).arguments
    groups = given.get("pg_collection") or given.get("model_comm_pgs")  # up to 0.14
    original(self, config, _in_group(submodules, groups, specified), *args, **kwargs)


def _in_group(submodules: Any, groups: Any, told: Callable[..., Any]) -> Any:
    """Return a copy of a CrossAttention spec that passes the process group to its layers."""
    if groups is None:
        return submodules
    layers = {name: told(getattr(submodules, name), tp_group=groups.tp) for name in ("linear_q", "linear_kv")}
    return dataclasses.replace(submodules, **layers)
