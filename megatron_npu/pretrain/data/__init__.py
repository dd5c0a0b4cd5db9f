"""Provide samples and tokenizers to the built-in trainer."""
