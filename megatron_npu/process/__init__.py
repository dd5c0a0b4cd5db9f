"""Manage the process itself: signals, stack traces, exit, and the environment of child processes."""
