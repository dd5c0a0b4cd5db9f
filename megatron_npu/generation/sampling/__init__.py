"""Select tokens and define the Sampler, which generates text with a GPT model in memory and reads no
checkpoints.
"""
