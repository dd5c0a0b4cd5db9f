"""Run one rank of a planned job: its device, its absent peers, and its measurements."""
