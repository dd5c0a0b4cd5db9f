"""Tokenizers of this package's commands: GPT-2's BPE and Hugging Face's files, without importing torch."""
