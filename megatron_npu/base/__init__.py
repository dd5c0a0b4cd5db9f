"""Provide basic modules that all other modules may import: errors, settings, files and the flag parser."""
