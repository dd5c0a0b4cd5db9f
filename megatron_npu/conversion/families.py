"""The families of models that can be converted, by their ``model_type`` in ``config.json``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from megatron_npu.conversion import hf_gpt2, hf_llama, refusals
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.rules import Rule


class Family(Protocol):
    """What a module of a family has; each says more."""

    MODEL_TYPE: str

    def flags(self, config: Config) -> list[str]: ...

    def config(self, args: Namespace) -> dict[str, Any]: ...

    def rules(self, args: Namespace) -> Iterator[Rule]: ...

    def names(self, stored: Iterable[str]) -> dict[str, str]: ...

    def copies(self, args: Namespace) -> dict[str, str]: ...

    def is_constant(self, name: str, tensor: Tensor) -> bool: ...


FAMILIES: dict[str, Family] = {family.MODEL_TYPE: family for family in (hf_gpt2, hf_llama)}


def of_config(config: Config) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        UsageError: another ``model_type``, or quantised weights.
    """
    family = FAMILIES.get(config.take("model_type", ""))
    if family is None:
        kind = config.take("model_type", "")
        raise config.refusal("model_type", kind, " or ".join(f'"{name}"' for name in FAMILIES))
    if config.has("quantization_config"):
        raise config.refusal("quantization_config", config.take("quantization_config"), "whole weights")
    return family


def of_arguments(args: Namespace) -> Family:
    """Return the family that can hold a checkpoint of the driver; ``Family.config`` says whether it does.

    Raises:
        UsageError: a flag that no family has.
    """
    refusals.common(args)
    return hf_llama if args.position_embedding_type == "rope" else hf_gpt2
