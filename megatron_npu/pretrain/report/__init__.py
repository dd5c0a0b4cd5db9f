"""Report a run's progress in the log, JSON lines, TensorBoard and the dashboard."""
