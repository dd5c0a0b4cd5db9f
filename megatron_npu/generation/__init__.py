"""Text from a live GPT: the rules by which a token is chosen, and the Sampler. Knows no checkpoint."""
