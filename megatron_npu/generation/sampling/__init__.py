"""Generate text with a GPT model that is in memory: select tokens and define the Sampler, which reads no
checkpoints.
"""
