"""Define the interface of a model family: its traits, and how its keys, flags and tensors are converted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_npu.conversion import unsupported
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.weight_map import WeightMapping
from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.frozen_flags import Flags

# what tells families apart, by the flag that a checkpoint was trained with
POSITIONS = "--position-embedding-type"  # other than those that are rotated
QK_NORM = "--qk-layernorm"
QKV_BIAS = "--add-qkv-bias"  # of a model without other biases
ATTENTION_BIAS = "--add-attention-bias"
WINDOW = "--pre-tockens"  # that leaves tokens out, in every layer
SOME_WINDOWS = "--window-attn-skip-freq"  # the same in some of the layers
EXPERTS = "--num-experts"
SHARED_EXPERT = "--moe-shared-expert-intermediate-size"


def traits_of(args: Flags) -> frozenset[str]:
    """Return the traits that the model in a checkpoint of the built-in trainer has."""
    experts = args.num_experts is not None
    windows = unsupported.windows(args)
    there = {
        POSITIONS: args.position_embedding_type not in rotary_flags.ROTATED,
        QK_NORM: args.qk_layernorm,
        QKV_BIAS: args.add_qkv_bias and not (args.add_bias_linear or args.add_attention_bias),
        ATTENTION_BIAS: args.add_attention_bias,
        WINDOW: all(windows),
        SOME_WINDOWS: any(windows) and not all(windows),
        EXPERTS: experts,
        SHARED_EXPERT: experts and args.moe_shared_expert_intermediate_size is not None,
    }
    return frozenset(flag for flag, has in there.items() if has)


@dataclass(frozen=True)
class Family(ABC):
    """Base class of the model families.

    Attributes:
        MODEL_TYPE: the family's ``model_type`` in ``config.json``.
    """

    MODEL_TYPE: str

    @property
    @abstractmethod
    def traits(self) -> frozenset[str]:
        """The traits that every model of this family has."""

    @property
    def optional_traits(self) -> frozenset[str]:
        """The traits that only some models of the family have."""
        return frozenset()

    def claims(self, args: Flags) -> bool:
        """Return True if the model in a trainer's checkpoint has the traits of this family and no others.

        No two families claim the same checkpoint, because their traits differ.
        """
        found = traits_of(args)
        return self.traits <= found <= self.traits | self.optional_traits

    @abstractmethod
    def flags(self, config: Config) -> list[str]:
        """Return the trainer's flags that describe the same model as ``config.json``.

        Raises:
            UsageError: Megatron has no flag for a key.
        """

    @abstractmethod
    def config(self, args: Flags) -> dict[str, Any]:
        """Return the ``config.json``, for transformers 4 and 5, of the model that the flags describe.

        Raises:
            UsageError: the family has no key for a flag.
        """

    @abstractmethod
    def weight_map(self, args: Flags) -> Iterator[WeightMapping]:
        """Yield, for every parameter, the mapping between the two formats."""

    @abstractmethod
    def canonical_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Map the names of tensors in the files to their names in the weight map."""

    @abstractmethod
    def tied_weights(self, args: Flags) -> dict[str, str]:
        """Map the name of each tied tensor to the name of the tensor that it shares."""

    @abstractmethod
    def is_buffer(self, name: str, tensor: Tensor) -> bool:
        """Return True if ``config.json`` determines a tensor, which then need not be converted."""
