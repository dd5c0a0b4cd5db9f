"""Add, reject and read command-line flags of the stock scripts."""
