"""Adaptors of megatron-core (``megatron.core.*``) and of the training scripts of the same tag.

One module or folder per subject; its docstring says what of upstream it connects. An adaptor only records
patches; see ``patching``.
"""
