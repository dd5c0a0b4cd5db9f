"""Contain the adaptors for Megatron-LM 285068c8 (January 2023), with ``megatron/model/transformer.py``.

There is one module per subject, whose docstring names the upstream code that it patches. An adaptor only
records patches; see ``patching``. ``unpatched`` lists the functions that are intentionally not patched.
"""
