"""Adaptors of bigscience's Megatron-DeepSpeed at 8387ae17, whose models DeepSpeed's engine may train.

One module per subject; its docstring says what of upstream it connects. An adaptor only records patches; see
``patching``. What upstream shares with Megatron-LM is in ``shared``.
"""
