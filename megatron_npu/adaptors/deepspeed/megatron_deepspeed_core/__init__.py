"""Adaptors of deepspeedai's Megatron-DeepSpeed at 4efb479d, which carries a megatron-core 0.2.0 of its own.

One module per subject; its docstring says what of upstream it connects. An adaptor only records patches; see
``patching``. What upstream shares with the other trees of old is in ``shared``.
"""
