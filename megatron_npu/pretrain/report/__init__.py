"""Output of a run: the log, JSON lines, TensorBoard and the dashboard."""
