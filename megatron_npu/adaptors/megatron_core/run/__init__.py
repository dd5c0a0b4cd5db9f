"""A run from its start to its log: initialization, process groups, schedules, diagnostics."""
