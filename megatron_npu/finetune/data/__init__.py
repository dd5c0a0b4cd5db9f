"""Dataset support for ``megatron-npu train``: loading datasets, checking them and creating batches."""
