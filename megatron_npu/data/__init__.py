"""Convert text to token ids, and store the ids as ``.bin/.idx`` datasets."""
