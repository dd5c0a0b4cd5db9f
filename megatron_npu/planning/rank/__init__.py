"""Run one rank of a planned job, with its simulated device, without its peers, and measure it."""
