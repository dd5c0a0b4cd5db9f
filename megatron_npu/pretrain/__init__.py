"""Implement the built-in trainer, which pre-trains GPT models with megatron-core's public API and
Megatron's flags.
"""
