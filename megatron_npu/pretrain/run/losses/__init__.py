"""Losses of a run: those of tokens, of prediction layers and of the balancing of experts."""
