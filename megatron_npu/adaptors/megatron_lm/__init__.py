"""Adaptors of Megatron-LM 285068c8 (January 2023), with ``megatron/model/transformer.py``.

One module per subject; its docstring says what of upstream it connects. An adaptor only records patches; see
``patching``. What runs unpatched on purpose is in ``unpatched``.
"""
