"""Layer code shared by several upstreams: matmuls, norms, fusions, the output layer."""
