"""Fixes of upstream's wrong numbers, only with ``MEGATRON_NPU_BACKPORT=1``: they change losses and gradients.

Each says in ``versions`` which versions have the bug, and in ``until`` which has the fix and its number.
"""
