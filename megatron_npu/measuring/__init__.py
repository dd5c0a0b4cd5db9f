"""``megatron-npu bench``: measure the four tables of the PAI-Rapidformer document on this machine."""
