"""``megatron.p2p_communication``."""

from megatron_npu.hosts.megatron_lm.records import unnecessary

unnecessary(
    "megatron.p2p_communication:_communicate",
    why="batched sends work on HCCL, NCCL and gloo; what gloo needs is in gather_split_1d_tensor and in the "
    "redirection of isend",
)
