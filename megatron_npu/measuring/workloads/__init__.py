"""Define the workloads, each of which trains a ``Job`` with a ``Meter`` and returns the number of
parameters.
"""
