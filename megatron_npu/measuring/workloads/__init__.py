"""Define workloads, which train a ``Job`` with a ``Meter`` and return the number of parameters."""
