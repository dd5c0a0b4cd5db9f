"""Provide GPT-2's BPE tokenizer, BERT's WordPiece and Hugging Face tokenizers without importing torch."""
