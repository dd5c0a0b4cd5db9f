"""Layer code shared by several Megatrons: products, norms, fusions, the output layer."""
