"""Prepare a user's model for the switches: sharded, compiled, in 16 bits."""
