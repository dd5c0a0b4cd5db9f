"""Samples and tokenizers for the built-in trainer."""
