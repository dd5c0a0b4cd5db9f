"""Run one rank of a planned job on its simulated device, without its peers, and measure the rank."""
