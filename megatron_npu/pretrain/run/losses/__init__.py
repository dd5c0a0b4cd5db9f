"""Compute the losses of a run: token losses, prediction-layer losses and expert balancing losses."""
