"""The stand-in for megatron-core's C++ index builder, number for number against the compiled one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.standins.datasets import compiled_dataset_indices as indices
from megatron_npu.standins.datasets import core_dataset_helpers as ours
from megatron_npu.upstream import megatrons


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request, monkeypatch):
    """With the C++ of ours, and as where there is no compiler."""
    if request.param == "python":
        monkeypatch.setattr(indices, "library", lambda: None)
    elif indices.library() is None:
        pytest.skip("no g++ to compile the indices of datasets with")


@pytest.fixture(scope="module")
def compiled():
    """The extension that the installed wheel ships."""
    try:
        root = megatrons.find().root
    except UsageError:
        pytest.skip("no Megatron is installed")
    files = list((root / "megatron/core/datasets").glob("helpers_cpp*.so"))
    if not files:
        pytest.skip(f"the Megatron in {root} has no compiled helpers_cpp to compare with")
    spec = importlib.util.spec_from_file_location("helpers_cpp", Path(files[0]))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 1),
    epochs=st.integers(1, 3),
    seq_length=st.integers(2, 17),
    drop_last=st.booleans(),
    extra=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_samples_begin_where_upstream_begins_them(
    compiled, lengths, epochs, seq_length, drop_last, extra, seed
):
    sizes = np.array(lengths, dtype=np.int32)
    order = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    np.random.default_rng(seed).shuffle(order)
    arguments = (sizes, order, seq_length, epochs, int(sizes.sum()), drop_last, extra)
    for name in ("build_sample_idx_int32", "build_sample_idx_int64"):
        theirs, mine = getattr(compiled, name)(*arguments), getattr(ours, name)(*arguments)
        assert mine.dtype == theirs.dtype
        assert mine.flags.c_contiguous
        np.testing.assert_array_equal(mine, theirs)


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_every_sample_is_taken_once_in_upstreams_order(compiled, sizes):
    results = []
    for module in (compiled, ours):
        index, sample = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
        # the extension takes a list, too: upstream's datasets pass one
        given_sizes = sizes if module is ours else np.array(sizes, np.int64)
        module.build_exhaustive_blending_indices(index, sample, given_sizes, len(sizes))
        results.append((index, sample))
    for theirs, mine in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@settings(max_examples=50)
@given(shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40), size=st.integers(1, 200))
def test_blends_follow_upstreams_order(compiled, shares, size):
    weights = np.array(shares) / sum(shares)
    results = []
    for module in (compiled, ours):
        index, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        module.build_blending_indices(index, sample, weights, len(weights), size, False)
        results.append((index, sample))
    for theirs, mine in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_dataset_without_samples_is_never_taken():
    """Upstream's extension writes behind the arrays then."""
    index, sample = np.zeros(5, np.int16), np.zeros(5, np.int64)
    ours.build_exhaustive_blending_indices(index, sample, np.array([0, 3, 0, 2]), 4)
    assert sorted(zip(index.tolist(), sample.tolist(), strict=True)) == [
        (1, 0),
        (1, 1),
        (1, 2),
        (3, 0),
        (3, 1),
    ]


def test_what_is_no_array_of_the_extensions_is_filled_as_well():
    """Of another type, or with gaps: the extension takes any integers, and so does Python."""
    weights, results = np.array([0.5, 0.3, 0.2]), []
    for index, sample in (
        (np.zeros(90, np.int16), np.zeros(90, np.int64)),
        (np.zeros(180, np.int32)[::2], np.zeros(180, np.int64)[::2]),
    ):
        ours.build_blending_indices(index, sample, weights, 3, 90, False)
        results.append((index.tolist(), sample.tolist()))
    assert results[0] == results[1]


def test_a_blend_is_one_whatever_is_done_at_a_time(monkeypatch):
    weights, results = np.array([0.5, 0.3, 0.2]), []
    for at_a_time in (7, 1 << 21):
        monkeypatch.setattr(indices, "_AT_A_TIME", at_a_time)
        index, sample = np.zeros(90, np.int16), np.zeros(90, np.int64)
        ours.build_blending_indices(index, sample, weights, 3, 90, False)
        results.append((index.tolist(), sample.tolist()))
    assert results[0] == results[1]


def test_every_name_of_the_extension_is_there(compiled):
    assert {name for name in vars(compiled) if name.startswith("build_")} <= set(ours.__all__)


def test_it_is_needed_only_where_nothing_is_compiled(tmp_path, monkeypatch):
    from megatron_npu import standins

    monkeypatch.delitem(sys.modules, "megatron.core.datasets.helpers_cpp", raising=False)
    (standin,) = (item for item in standins.STAND_INS if item.name.endswith("helpers_cpp"))
    folder = tmp_path / "megatron" / "core" / "datasets"
    folder.mkdir(parents=True)
    checkout = megatrons.Upstream("megatron_core", "0.16.1", tmp_path)
    assert standins.is_needed(standin, checkout)
    (folder / "helpers_cpp.cpython-27-other.so").touch()  # another Python's
    assert standins.is_needed(standin, checkout)
    (folder / f"helpers_cpp{standins.EXTENSION_SUFFIXES[0]}").touch()
    assert not standins.is_needed(standin, checkout)
