"""Accelerated training of Transformers and of a user's own models, by switches or by template."""
