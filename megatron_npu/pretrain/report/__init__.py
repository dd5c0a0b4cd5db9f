"""Report the progress of a run in the log, as JSON lines, in TensorBoard and in the dashboard."""
