"""Datasets for ``megatron-npu train``: load them, check them and create batches."""
