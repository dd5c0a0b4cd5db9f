"""The built-in trainer: GPT pre-training on megatron-core's public API, with Megatron's own flags."""
