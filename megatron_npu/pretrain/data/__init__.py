"""Samples and tokenizer of the built-in trainer."""
