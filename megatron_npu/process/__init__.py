"""The process itself: signals, stacks, how it ends, what its children inherit."""
