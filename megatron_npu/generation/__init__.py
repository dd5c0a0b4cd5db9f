"""Generate text with a GPT in memory: token selection and the Sampler. Independent of checkpoints."""
