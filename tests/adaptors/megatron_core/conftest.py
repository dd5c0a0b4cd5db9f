"""A real megatron-core in this process, patched, and its small configurations."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from tests.support.core_models import make_config, make_ddp, single_process  # noqa: F401  (a fixture)
