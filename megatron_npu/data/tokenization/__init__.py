"""Tokenizers of our own commands: GPT-2's byte-pair encoding and Hugging Face's files. Knows no torch."""
