"""Prepare a user's model according to the switches: sharding, compilation, 16-bit precision and others."""
