"""A run of the driver: from the command to the last iteration."""
