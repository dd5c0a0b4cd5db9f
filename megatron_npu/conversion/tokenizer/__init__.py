"""The tokenizer of a converted checkpoint: its files, and a check that it produces the original's ids."""
