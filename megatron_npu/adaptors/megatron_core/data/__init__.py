"""Patch the datasets, batches and tokenizers of megatron-core."""
