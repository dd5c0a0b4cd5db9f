"""``megatron-npu bench``: measure the four tables of a document on accelerated training on this machine."""
