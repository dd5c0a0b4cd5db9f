"""Copy the tokenizer of a converted checkpoint, and check that it produces the original ids."""
