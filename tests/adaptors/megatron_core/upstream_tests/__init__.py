"""What ``run_upstream_tests.py`` is made of, and what it recorded: one baseline per tree and device.

The imports in here are relative, because in a rank the package ``tests`` is Megatron's, not ours.
"""
