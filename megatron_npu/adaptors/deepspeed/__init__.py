"""Adaptors of the two Megatron-DeepSpeeds: one folder each, and shared parts."""
