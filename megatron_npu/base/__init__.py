"""Basic modules that all others may import: errors, settings, files, the flag parser."""
