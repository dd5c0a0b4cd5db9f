"""The families of models that can be converted, by their ``model_type`` in ``config.json``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from megatron_npu.conversion import hf_gpt2, unsupported
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.hf_llama import LLAMA, MISTRAL, QWEN2, QWEN3
from megatron_npu.conversion.hf_moe import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from megatron_npu.conversion.weight_map import WeightMapping
from megatron_npu.errors import UsageError


class Family(Protocol):
    """What a family has, be it a module or an object; each says more."""

    @property
    def MODEL_TYPE(self) -> str: ...  # noqa: N802

    def flags(self, config: Config) -> list[str]: ...

    def config(self, args: Namespace) -> dict[str, Any]: ...

    def weight_map(self, args: Namespace) -> Iterator[WeightMapping]: ...

    def canonical_names(self, stored: Iterable[str]) -> dict[str, str]: ...

    def tied_weights(self, args: Namespace) -> dict[str, str]: ...

    def is_buffer(self, name: str, tensor: Tensor) -> bool: ...


FAMILIES: dict[str, Family] = {
    family.MODEL_TYPE: family
    for family in (hf_gpt2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
}


def of_config(config: Config) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        UsageError: another ``model_type``, or quantised weights.
    """
    kind = config.text("model_type")
    family = FAMILIES.get(kind)
    if family is None:
        raise config.refusal("model_type", kind, " or ".join(f'"{name}"' for name in FAMILIES))
    if config.has("quantization_config"):
        raise config.refusal("quantization_config", config.take("quantization_config"), "whole weights")
    return family


def of_arguments(args: Namespace, before: str | None = None) -> Family:
    """Return the family that can hold a checkpoint of the driver; ``Family.config`` says whether it does.

    Args:
        args: the checkpoint's flags.
        before: the ``model_type`` that the checkpoint was converted from. It decides where two families can
            hold the same model: a Mistral without a window is a Llama, too.

    Raises:
        UsageError: a flag that no family has.
    """
    unsupported.common(args)
    if before in FAMILIES and _holds(FAMILIES[before], args):
        return FAMILIES[before]
    if args.position_embedding_type != "rope":
        return hf_gpt2
    if args.num_experts is not None:
        return next((kind for kind in (QWEN3_MOE, QWEN2_MOE) if kind.claims(args)), MIXTRAL)
    return next((kind for kind in (QWEN3, QWEN2, MISTRAL) if kind.claims(args)), LLAMA)


def _holds(family: Family, args: Namespace) -> bool:
    try:
        family.config(args)
    except UsageError:
        return False
    return True
