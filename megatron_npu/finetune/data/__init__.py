"""Data sets of ``megatron-npu train``: read, checked, made into batches."""
