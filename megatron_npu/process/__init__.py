"""Manage this process: its signals, stack traces and exit, and the environment of its children."""
