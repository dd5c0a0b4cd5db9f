"""Implement the built-in trainer, which pre-trains GPT on megatron-core's public API with Megatron's
flags.
"""
