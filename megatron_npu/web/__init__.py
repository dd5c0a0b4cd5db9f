"""What the servers of this project have in common: where they listen, and what every answer says."""
