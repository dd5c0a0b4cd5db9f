"""Datasets, batches and tokenizers of megatron-core."""
