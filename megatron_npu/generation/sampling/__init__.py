"""Generate text with a GPT model in memory: token selection and the Sampler, independent of checkpoints."""
