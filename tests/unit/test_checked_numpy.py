"""numpy's values in a file of torch: numbers and arrays of them come back; all else is refused, not built."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from torch import serialization

from megatron_npu.safe_files import safe_load

KINDS = "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 >i4 >f8".split()


def again(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    with safe_load.weights_only():
        return torch.load(stream)


@pytest.fixture(autouse=True)
def numpy_allowed():
    """numpy's own, as megatron-core allows them for the whole process."""
    reconstruct = np.arange(1).__reduce__()[0]
    with safe_load.allowing(reconstruct, np.ndarray, np.dtype, np.float64(0).__reduce__()[0]):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_arrays_come_back(kind, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    for order in "CF":
        loaded = again({"a": np.array(array, order=order)})["a"]
        np.testing.assert_array_equal(loaded, array)
        assert loaded.dtype == array.dtype.newbyteorder("=")  # numpy's own turns them, too
        assert type(pickle.loads(pickle.dumps(loaded))) is np.ndarray


def test_the_state_of_the_random_generator_comes_back():
    former = np.random.get_state()
    np.random.set_state(again(former))
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), former, strict=True))


@pytest.mark.parametrize("number", [np.float64(1.5), np.int64(-3), np.bool_(True), np.float16(0.5)], ids=repr)
def test_numbers_come_back(number):
    loaded = again([number])[0]
    assert loaded == number
    assert loaded.dtype == number.dtype


class Call:
    """Pickled as a call of a function of numpy's, and a state for what it returns."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


RECONSTRUCT, EMPTY = np.arange(1).__reduce__()[:2]
SCALAR = np.float64(0).__reduce__()[0]
FOUR = np.dtype("i4")
HOSTILE = {
    "objects": Call(np.dtype, ("O8", False, True)),
    "a field": Call(np.dtype, ("V8", False, True), (3, "<", None, ("a",), {"a": (FOUR, 0)}, 8, 1, 0)),
    "names": Call(np.dtype, ("i4", False, True), (3, "<", None, ("a",), None, 4, 4, 63)),
    "no state": Call(np.dtype, ("i4", False, True), (3,)),
    "another byte order": Call(np.dtype, ("i4", False, True), (3, "?", None, None, None, -1, -1, 0)),
    "a shape beyond its bytes": Call(RECONSTRUCT, EMPTY, (1, (1 << 40,), FOUR, False, b"1234")),
    "a shape below nothing": Call(RECONSTRUCT, EMPTY, (1, (-1, -1), FOUR, False, b"1234")),
    "a list for bytes": Call(RECONSTRUCT, EMPTY, (1, (1,), FOUR, False, [1])),
    "no dtype": Call(RECONSTRUCT, EMPTY, (1, (4,), "i1", False, b"1234")),
    "an array of dtypes": Call(RECONSTRUCT, (np.dtype, (0,), b"b")),
    "a truncated number": Call(SCALAR, (FOUR, b"12")),
    "an object for bytes": Call(SCALAR, (FOUR, (1,))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_number_is_refused(name):
    with pytest.raises(pickle.UnpicklingError):
        again(HOSTILE[name])


def test_numpys_own_are_allowed_again_afterwards():
    before = set(serialization.get_safe_globals())
    again(np.arange(3))
    assert set(serialization.get_safe_globals()) == before
