"""Datasets, batches and tokenizers."""
