"""Define the flags that several commands share, with one file for each feature."""
