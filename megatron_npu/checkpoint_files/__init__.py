"""Manage checkpoint files: checksums, locks, per-machine parts, and the comparison of replicas."""
