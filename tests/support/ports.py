"""Find a free port for a program that a test starts.

The code is in a folder that imports nothing of ours beside it: it runs where ``tests`` is Megatron's package.
"""

from __future__ import annotations

from tests.adaptors.megatron_core.upstream_tests.ports import free_port

__all__ = ["free_port"]
