"""Checksums, locks and per-machine parts of checkpoints, and comparison of replicas."""
