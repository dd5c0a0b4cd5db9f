"""A run of a stock script: initialization, process groups, schedules, diagnostics."""
