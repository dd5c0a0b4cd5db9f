"""Rotary positions of Hugging Face's models in Megatron's words."""
