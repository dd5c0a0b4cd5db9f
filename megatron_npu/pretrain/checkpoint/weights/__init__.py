"""Weights on their way between a checkpoint and the ranks of a run."""
