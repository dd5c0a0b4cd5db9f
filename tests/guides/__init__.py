"""The pages of docs/guides, each run from its first command to its last."""
