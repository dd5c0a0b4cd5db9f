"""Describe a conversion that is requested on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.pretrain.flags.plan_parts import Part


@dataclass(frozen=True)
class Request(Part):
    """The flags of ``megatron-npu convert``. None: the source, or what is installed, determines the value."""

    source: str
    destination: str
    origin: str  # the format of the source: hf or megatron
    target: str  # and of the destination
    dtype: str | None
    proof: str | None
    make_vocab_size_divisible_by: int
    ckpt_format: str
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    hf_weights: str
    max_shard_gb: float
    tokenizer_type: str | None
    eos_token: str | None
    vocab_file: str | None
    merge_file: str | None

    @property
    def sizes(self) -> tuple[int, int]:
        """The tensor-parallel and the pipeline-parallel size of the converted checkpoint."""
        return self.tensor_model_parallel_size, self.pipeline_model_parallel_size
