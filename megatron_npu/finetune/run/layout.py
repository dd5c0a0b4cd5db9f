"""Define the flags for model parallelism, which is supported only for megatron-core models."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags.plan_parts import Part


@dataclass(frozen=True)
class ModelParallel(Part):
    """The tensor-parallel size and the pipeline-parallel size."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int

    @property
    def is_cut(self) -> bool:
        """True if the flags request model parallelism."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size > 1

    def refused_for(self, what: str) -> UsageError:
        """Return the error that is raised if a model does not support the requested model parallelism.

        Args:
            what: description of the model.
        """
        return UsageError(
            f"--tensor-model-parallel-size {self.tensor_model_parallel_size} and "
            f"--pipeline-model-parallel-size {self.pipeline_model_parallel_size} cannot be used with {what}: "
            "both must be 1, because each rank has all layers, or a shard of each weight (--zero-3-...). Use "
            "model parallelism only with Megatron models: `megatron-npu pretrain`, or a PreTrainer."
        )
