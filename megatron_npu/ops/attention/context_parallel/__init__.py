"""Attention over a sequence whose tokens are spread over the ranks of a context-parallel group."""
