"""Contain the adaptors for megatron-core (``megatron.core.*``) and the training scripts of the same tag.

There is one module or folder per subject, whose docstring names the upstream code that it patches. An adaptor
only records patches; see ``patching``.
"""
