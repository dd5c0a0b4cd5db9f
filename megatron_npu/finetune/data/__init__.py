"""Load and check datasets, and create batches, for ``megatron-npu train``."""
