"""Provide tokenizers without importing torch: GPT-2's BPE, BERT's WordPiece and Hugging Face's files."""
