"""Patch how a stock script runs: initialization, process groups, schedules and diagnostics."""
