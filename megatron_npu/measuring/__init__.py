"""``megatron-npu bench``: the four tables of a document about accelerated training, on this machine."""
