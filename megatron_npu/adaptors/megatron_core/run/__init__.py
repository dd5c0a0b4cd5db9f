"""Patch the run of a stock script: initialization, process groups, schedules and diagnostics."""
