"""Execute a ``megatron-npu train`` run: the command, its ranks, the training loop, checkpoints and export."""
