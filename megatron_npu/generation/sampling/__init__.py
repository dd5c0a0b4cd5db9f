"""Text from a live GPT: how tokens are chosen, and the Sampler; knows no checkpoint."""
