"""``megatron.p2p_communication``."""

from megatron_npu.adaptors.megatron_lm.decorators import watch

watch(
    "megatron.p2p_communication:_communicate",
    why="batched sends work on HCCL, NCCL and gloo; what gloo needs is in gather_split_1d_tensor and in the "
    "redirection of isend",
)
