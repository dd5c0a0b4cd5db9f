"""Our indices of datasets against those of upstream's C++, compiled into a scratch folder."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.standins.datasets import compiled_dataset_indices as compiled
from megatron_npu.standins.datasets import dataset_helpers as ours
from megatron_npu.standins.datasets import wide_dataset_helpers
from tests.support import processes


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request, monkeypatch):
    """With the C++ of ours, and as where there is no compiler."""
    if request.param == "python":
        monkeypatch.setattr(compiled, "library", lambda: None)
    elif compiled.library() is None:
        pytest.skip("no g++ to compile the indices of datasets with")


@pytest.fixture(scope="session")
def theirs(checkout, tmp_path_factory):
    """Upstream's extension ``megatron.data.helpers``."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile upstream's helpers.cpp with")
    target = tmp_path_factory.mktemp("built") / "helpers.so"
    includes = [Path(torch.__file__).parent / "include", sysconfig.get_path("include")]  # torch has pybind11
    # two of one name in a process: else the second would find functions of the first
    options = [
        "-fno-gnu-unique",
        "-fvisibility=hidden",
        "-O1",
        "-shared",
        "-std=c++17",
        "-fPIC",
        *(f"-I{folder}" for folder in includes),
    ]
    source = checkout / "megatron" / "data" / "helpers.cpp"
    built = processes.run(
        [compiler, *options, str(source), "-o", str(target)], capture_output=True, text=True, check=False
    )
    if built.returncode:
        pytest.skip(f"upstream's helpers.cpp does not compile here: {built.stderr[:300]}")
    spec = importlib.util.spec_from_file_location("helpers", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(left, right):
    np.testing.assert_array_equal(left, right)
    assert left.dtype == right.dtype


few = settings(max_examples=40)
# equal ones among them, whose order counts; enough for vectors of lanes
WEIGHTS = st.lists(st.floats(0.01, 1) | st.sampled_from([0.25, 0.5]), min_size=1, max_size=40)


@few
@given(data=st.data())
def test_samples(theirs, data):
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda s: sum(s) > 1))
    epochs, length = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 40))
    sizes = np.array(sizes, np.int32)
    order = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    np.random.RandomState(data.draw(st.integers(0, 99))).shuffle(order)
    arguments = (sizes, order, length, epochs, int(sizes.sum()))
    same(ours.build_sample_idx(*arguments), theirs.build_sample_idx(*arguments))


@few
@given(weights=WEIGHTS, size=st.integers(0, 200))
def test_blending(theirs, weights, size):
    weights = np.array(weights) / sum(weights)
    results = []
    for module in (ours, theirs):
        index, sample = np.zeros(size, np.uint8), np.zeros(size, np.int64)
        module.build_blending_indices(index, sample, weights, len(weights), size, False)
        results.append((index, sample))
    for left, right in zip(*results, strict=True):
        same(left, right)


def test_samples_of_deepspeedai_begin_in_64_bits():
    """``megatron/data/helpers.cpp`` of 4efb479d makes an array of int64_t."""
    arguments = (np.array([5, 7, 1], np.int32), np.arange(3, dtype=np.int32), 3, 1, 13)
    wide, narrow = (module.build_sample_idx(*arguments) for module in (wide_dataset_helpers, ours))
    assert (wide.dtype, narrow.dtype) == (np.int64, np.int32)
    np.testing.assert_array_equal(wide, narrow)


def test_samples_of_documents_that_are_not_there_are_refused():
    if compiled.library() is None:
        return  # numpy raises an IndexError
    with pytest.raises(UsageError, match="does not match its documents"):
        ours.build_sample_idx(np.ones(3, np.int32), np.array([0, 3], np.int32), 2, 1, 4)


def test_sentences_that_are_not_there_are_refused():
    docs, sizes = np.array([0, 9], np.int64), np.ones(4, np.int32)
    with pytest.raises((UsageError, IndexError)):
        ours.build_mapping(docs, sizes, 1, 9, 5, 0.0, 1, False, 2)


def sentences(data) -> tuple[np.ndarray, np.ndarray]:
    """Draw documents of sentences, empty ones and ones with an overlong sentence among them."""
    length = st.integers(1, 40) | st.sampled_from([512, 513])
    documents = data.draw(st.lists(st.lists(length, max_size=7), min_size=1, max_size=8))
    ends = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return ends, np.array([size for document in documents for size in document], np.int32)


@few
@given(data=st.data())
def test_mapping(theirs, data):
    docs, sizes = sentences(data)
    arguments = (
        data.draw(st.integers(1, 4)),  # epochs
        data.draw(st.integers(1, 60)),  # samples at most
        data.draw(st.integers(2, 90)),  # tokens of a sample
        data.draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])),  # short samples
        data.draw(st.integers(1, 2**31 - 2)),  # seed
        False,
        data.draw(st.integers(1, 2)),  # sentences at least
    )
    same(ours.build_mapping(docs, sizes, *arguments), theirs.build_mapping(docs, sizes, *arguments))


@few
@given(data=st.data())
def test_blocks(theirs, data):
    docs, sizes = sentences(data)
    titles = np.full(len(docs) - 1, data.draw(st.integers(0, 12)), np.int32)
    arguments = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 60)),
        data.draw(st.integers(8, 90)),
        data.draw(st.integers(1, 2**31 - 2)),
        False,
        data.draw(st.booleans()),
    )
    same(
        ours.build_blocks_mapping(docs, sizes, titles, *arguments),
        theirs.build_blocks_mapping(docs, sizes, titles, *arguments),
    )


def test_random_numbers_beyond_one_block(theirs):
    """More samples than either generator makes at a time (4,096 and 312)."""
    docs, sizes = np.arange(0, 9001, 3, dtype=np.int64), np.full(9000, 10, np.int32)
    arguments = (2, 10**9, 25, 0.1, 1234, False, 2)
    left, right = (module.build_mapping(docs, sizes, *arguments) for module in (ours, theirs))
    assert len(left) > 5000
    same(left, right)
