"""Contain the adaptors for bigscience's Megatron-DeepSpeed at 8387ae17, which trains with DeepSpeed's engine.

There is one module per subject, whose docstring names the upstream code that it patches. An adaptor only
records patches; see ``patching``. ``shared`` contains the code that this upstream has in common with
Megatron-LM.
"""
