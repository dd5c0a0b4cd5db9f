"""Names of Megatron-LM's trees; the code is where ``tests`` may be Megatron's package, as for ``ports``."""

from __future__ import annotations

from tests.adaptors.megatron_core.upstream_tests.trees import core_tag, name_of

__all__ = ["core_tag", "name_of"]
