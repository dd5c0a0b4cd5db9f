"""The embedded driver: pre-training of a GPT on megatron-core's public API, with Megatron's own flags."""
