"""What a run says: log, JSON lines, TensorBoard, dashboard."""
