"""Patch the layers of megatron-core, from the embedding to the loss."""
