"""Text to token ids to ``.bin/.idx``."""
