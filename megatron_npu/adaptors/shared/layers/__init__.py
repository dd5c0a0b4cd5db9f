"""Layer code that is shared by several upstreams: matmuls, norms, fusions and the output layer."""
