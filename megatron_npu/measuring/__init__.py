"""Implement ``megatron-npu bench``, which measures the four tables of the PAI-Rapidformer document."""
