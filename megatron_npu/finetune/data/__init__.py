"""Datasets of ``megatron-npu train``: loading, checks, batches."""
