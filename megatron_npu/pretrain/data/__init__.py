"""The driver's samples and tokenizer."""
