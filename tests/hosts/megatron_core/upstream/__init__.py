"""What ``run_upstream_tests.py`` is made of, and what it recorded: one baseline per tree and device."""
