"""Convert text to token ids, and store these as ``.bin/.idx`` datasets."""
