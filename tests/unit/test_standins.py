"""Stand-ins: put in place only for what is absent, only where a Megatron needs it, and taken out again."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from megatron_npu import standins
from megatron_npu.standins import mpu
from megatron_npu.upstream.megatrons import Upstream

LM = Upstream("megatron_lm", "285068c8", Path())
CORE = Upstream("megatron_core", "0.16.1", Path())
NAMES = ("apex", "apex.optimizers", "apex.multi_tensor_apply", "amp_C", "torch._six")


@pytest.fixture
def nothing_installed(monkeypatch):
    """Neither stand-ins nor the real packages (where a machine has them)."""
    for name in [m for m in sys.modules if m.split(".")[0] in ("apex", "amp_C") or m == "torch._six"]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in NAMES else found(name, *a)
    )
    yield
    standins.remove()
    for name in NAMES:
        sys.modules.pop(name, None)


def test_megatron_lm_finds_every_name_it_imports(nothing_installed):
    needed = {stand_in.name for stand_in in standins.install(LM)}
    assert set(NAMES) <= needed
    from amp_C import multi_tensor_l2norm, multi_tensor_scale
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam, FusedSGD
    from torch._six import inf

    assert inf == float("inf")
    grads = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    overflow = torch.zeros(1, dtype=torch.int32)
    norm, _ = multi_tensor_applier(multi_tensor_l2norm, overflow, [grads], False)
    assert norm.item() == pytest.approx(10.0)
    multi_tensor_applier(multi_tensor_scale, overflow, [grads, grads], 0.5)
    assert grads[0].tolist() == [1.5] * 4
    for kind in (FusedAdam, FusedSGD):
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        kind([{"params": [weight]}], lr=0.1, weight_decay=0.0).step()
        assert weight.tolist() == pytest.approx([0.9] * 3)


def test_an_optional_part_of_apex_stays_absent(nothing_installed):
    """Megatron-LM tries apex.contrib and takes an ImportError for an answer."""
    standins.install(LM)
    with pytest.raises(ImportError):
        importlib.import_module("apex.contrib.layer_norm.layer_norm")


def test_megatron_core_keeps_its_own_way_without_apex(nothing_installed):
    standins.install(CORE)
    assert not {"apex", "amp_C"} & set(sys.modules)


def test_a_real_package_is_left_alone(nothing_installed, monkeypatch):
    real = types.ModuleType("amp_C")
    real.__spec__ = ModuleSpec("amp_C", None)
    monkeypatch.setitem(sys.modules, "amp_C", real)
    assert "amp_C" not in {stand_in.name for stand_in in standins.install(LM)}
    standins.remove()
    assert sys.modules["amp_C"] is real


def test_remove_takes_out_what_install_put_in(nothing_installed):
    standins.install(LM)
    standins.remove()
    assert not {name for name in NAMES if name in sys.modules}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("megatron_lm", "datasets.dataset_helpers"),
        ("megatron_deepspeed", "datasets.dataset_helpers"),
        ("megatron_deepspeed_core", "datasets.wide_dataset_helpers"),
    ],
)
def test_helpers_that_a_checkout_has_compiled_are_used(tmp_path, name, source):
    """Of this Python; otherwise ours are, whose samples begin in as many bits."""
    upstream = Upstream(name, "0", tmp_path)
    entries = [one for one in standins.STAND_INS if one.name == "megatron.data.helpers"]
    (needed,) = [one for one in entries if standins.is_needed(one, upstream)]
    assert needed.source == f"megatron_npu.standins.{source}"
    (tmp_path / "megatron" / "data").mkdir(parents=True)
    (tmp_path / "megatron" / "data" / "helpers.cpython-27-other.so").touch()
    assert standins.is_needed(needed, upstream)
    (tmp_path / "megatron" / "data" / f"helpers{standins.EXTENSION_SUFFIXES[0]}").touch()
    assert not [one for one in entries if standins.is_needed(one, upstream)]


def test_transformer_engine_layers_can_be_imported_by_modules_that_do_not_try(tmp_path):
    (entry,) = [one for one in standins.STAND_INS if one.source.endswith("transformer_engine_layers")]
    importing = f"from {entry.source} import TENorm"
    trying: dict[str, object] = {"__name__": "megatron.core.models.vision.clip_vit_model"}
    with pytest.raises(ImportError, match="cannot import name"):
        exec(importing, trying)
    without_trying: dict[str, object] = {"__name__": "megatron.core.models.multimodal.llava_spec"}
    exec(importing, without_trying)
    with pytest.raises(ImportError, match="cannot be built"):
        without_trying["TENorm"]()
    newer = Upstream("megatron_core", "0.13.1", tmp_path)
    backends = tmp_path / entry.unless
    backends.parent.mkdir(parents=True)
    backends.touch()
    assert not standins.is_needed(entry, newer)


@pytest.mark.parametrize(
    ("file", "needed"), [("core/__init__.py", True), ("mpu/__init__.py", False), ("mpu/tests/x.py", True)]
)
def test_mpu_stands_in_where_a_megatron_has_none(tmp_path, monkeypatch, file, needed):
    place = tmp_path / "megatron" / file
    place.parent.mkdir(parents=True)
    place.touch()
    monkeypatch.setattr(mpu.megatrons, "find", lambda: Upstream("megatron_core", "0.16.1", tmp_path))
    assert mpu.is_needed() == needed


def test_mpu_has_the_names_of_core_and_broadcasts_among_one():
    from megatron.core import parallel_state, tensor_parallel

    assert mpu.get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
    assert mpu.ColumnParallelLinear is tensor_parallel.ColumnParallelLinear
    with pytest.raises(AttributeError, match="nothing_like_this"):
        mpu.nothing_like_this  # noqa: B018
    data = {"a": torch.arange(3), "b": torch.arange(2)}
    assert mpu.broadcast_data(["a"], data, torch.int64)["a"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="a must have data type"):
        mpu.broadcast_data(["a"], data, torch.int32)
