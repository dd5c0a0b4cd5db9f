"""One rank of a job that is planned: its device, its absent peers, what is noted of it."""
