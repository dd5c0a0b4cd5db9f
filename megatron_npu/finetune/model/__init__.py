"""Preparation of a user's model for the switches: sharding, compilation, 16-bit precision and others."""
