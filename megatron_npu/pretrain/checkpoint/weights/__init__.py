"""Convert weights between a checkpoint and the ranks of a run."""
