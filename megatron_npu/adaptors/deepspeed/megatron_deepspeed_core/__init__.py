"""Contain the adaptors for deepspeedai's Megatron-DeepSpeed at 4efb479d, which includes megatron-core 0.2.0.

There is one module per subject, whose docstring names the upstream code that it patches. An adaptor only
records patches; see ``patching``. ``shared`` contains the code that this upstream has in common with the
other old trees.
"""
