"""Define flags that several commands share, with one file per feature."""
