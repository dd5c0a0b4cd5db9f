"""Workloads, which take a ``Job`` and a ``Meter``, train, and return the number of parameters."""
