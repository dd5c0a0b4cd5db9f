"""Copy the tokenizer of a converted checkpoint, and check that the copy produces the same ids."""
