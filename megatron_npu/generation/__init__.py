"""Generate text from the checkpoint of a GPT model."""
