"""Contain layer code that several upstreams share: matmuls, norms, fusions and the output layer."""
