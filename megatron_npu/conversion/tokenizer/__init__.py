"""The tokenizer of a converted checkpoint: its files, and a check that it gives the original's ids."""
