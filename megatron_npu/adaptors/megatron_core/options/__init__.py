"""Add, reject and read flags of the stock scripts."""
