"""Manage the files of checkpoints: checksums, locks, parts on several machines, and the comparison of
replicas.
"""
