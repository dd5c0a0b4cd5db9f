"""Layers, from the embedding to the loss."""
