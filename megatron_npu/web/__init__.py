"""Common parts of this project's web servers: their addresses, and the headers of every response."""
