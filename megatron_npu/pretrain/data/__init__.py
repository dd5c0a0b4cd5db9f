"""Provide samples and tokenizers for the built-in trainer."""
