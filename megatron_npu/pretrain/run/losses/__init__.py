"""Compute the losses of a run: those of tokens, of prediction layers, and of expert balancing."""
