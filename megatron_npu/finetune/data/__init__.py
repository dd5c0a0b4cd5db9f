"""Load and check datasets, and create batches from them, for ``megatron-npu train``."""
