"""What several Megatrons have in common inside their layers: products, norms, fusions, the output layer."""
