"""A user's model as the switches want it: sharded, compiled, in 16 bits."""
