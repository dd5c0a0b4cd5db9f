"""Megatron-DeepSpeed patched and initialised in this process, as Megatron-LM for its checks."""

from tests.adaptors.megatron_lm.checks.conftest import args, initialised  # noqa: F401
