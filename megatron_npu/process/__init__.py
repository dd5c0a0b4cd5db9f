"""Helpers for the process itself: its signals, stacks and exit, and what its children inherit."""
