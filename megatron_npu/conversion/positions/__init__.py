"""Convert the rotary positions of Hugging Face's models to Megatron's flags."""
