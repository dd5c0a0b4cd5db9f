"""Adaptors of the two Megatron-DeepSpeeds, a folder for each, and what they share."""
