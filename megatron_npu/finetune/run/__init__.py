"""Execute a ``megatron-npu train`` run: command, ranks, loop, checkpoints and export."""
