"""Output of a run: log, JSON lines, TensorBoard, dashboard."""
