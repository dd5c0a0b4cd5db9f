"""A run of ``megatron-npu train``: command, ranks, loop, checkpoints, export."""
