"""The tokenizer of a converted checkpoint: its files, and the proof that it gives the ids of the original."""
