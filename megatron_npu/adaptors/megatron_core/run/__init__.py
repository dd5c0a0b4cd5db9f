"""A stock script's run: initialization, process groups, schedules, diagnostics."""
