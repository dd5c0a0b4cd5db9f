"""Define the checkpoint parts of a run's plan: what is stored, what is loaded, and what must be
compatible.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import Part


@dataclass(frozen=True)
class ShardFlags(Part):
    """Flags that determine how the state is sharded.

    ``fully_sharded`` names the FSDP: ``megatron``, ``torch`` or None.
    """

    fully_sharded: str | None
    use_distributed_optimizer: bool
    dist_ckpt_optim_fully_reshardable: bool


@dataclass(frozen=True)
class StoreFlags(ShardFlags):
    """Flags that determine the contents of a checkpoint.

    ``all_flags`` are the flags of the whole run: ``arguments.json`` stores them by name, and upstream's
    scripts read them from the ``args`` of a checkpoint, which must be a Namespace.
    """

    save: str
    no_save_optim: bool
    no_save_rng: bool
    all_flags: Flags

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        if not isinstance(args, Flags):
            raise TypeError("the flags are not resolved yet: pass the result of validation.check")
        return {"all_flags": args}


@dataclass(frozen=True)
class LayoutFlags(Part):
    """The parallel sizes that determine how a model's weights are distributed over the ranks."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    num_experts: int | None

    def sizes(self) -> dict[str, int]:
        """Return the sizes that must stay the same for each rank to find its own state, keyed by flag
        name.
        """
        result = {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
        }
        if self.num_experts is not None:
            result["expert_model_parallel_size"] = self.expert_model_parallel_size
            result["expert_tensor_parallel_size"] = self.expert_tensor_parallel_size
        return result


@dataclass(frozen=True)
class ResumeFlags(LayoutFlags):
    """Flags that decide whether a run is able to read a checkpoint's weights and optimizer state."""

    fully_sharded: str | None
    sharding: str
    optimizer: str
    use_distributed_optimizer: bool
    bf16: bool
    fp16: bool
    padded_vocab_size: int
    load_optim: bool


@dataclass(frozen=True)
class LoadFlags(LayoutFlags):
    """Flags that select the checkpoint, which parts of it are loaded, and how the schedule continues."""

    load: str
    ckpt_step: int | None
    verify_checkpoint: bool
    load_optim: bool
    load_rng: bool
    finetune: bool
    data_parallel_size: int
    global_batch_size: int
    padded_vocab_size: int
    tokenizer_vocab_size: int
    use_checkpoint_opt_param_scheduler: bool
    override_opt_param_scheduler: bool
