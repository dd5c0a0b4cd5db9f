"""Attention of megatron-core: what a query sees, over how many ranks, and by which operation."""
