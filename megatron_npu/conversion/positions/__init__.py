"""Convert the rotary positions of Hugging Face models to Megatron flags."""
