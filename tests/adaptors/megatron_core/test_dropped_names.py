"""Names that libraries on top of Megatron still read, in the meaning that they expect."""

from __future__ import annotations

import sys
import types

import pytest

pytest.importorskip("megatron.core")

from megatron_npu.adaptors.megatron_core.run import dropped_names


def test_a_layer_that_builds_itself_has_the_fields_that_the_forward_reads() -> None:
    class Layer:
        _pre_mlp_layernorm_returns_residual = True  # what a class says itself stays

    class OwnLayer(dropped_names.with_fields_of_layers_that_build_themselves(Layer)):
        def __init__(self) -> None:
            """Call nobody's."""

    layer = OwnLayer()
    assert layer._input_layernorm_returns_residual is False
    assert layer._pre_mlp_layernorm_returns_residual is True
    assert layer._legacy_forward_post_mlp is None


def test_instances_of_both_classes_are_those_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("adapter")
    for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):
        setattr(module, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "adapter", module)

    def factory(version: int) -> object:
        """Make one of the two."""
        return getattr(module, f"FullyShardedDataParallelV{version}")()

    factory.__module__, factory.__name__ = "adapter", "FullyShardedDataParallel"
    made = dropped_names.as_type_of_either(factory)
    assert type(made(version=2)).__name__ == "FullyShardedDataParallelV2"
    assert isinstance(made(1), (int, made))
    assert not isinstance("neither", (int, made))
    assert made.__doc__ == "Make one of the two."
