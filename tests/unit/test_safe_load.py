"""What torch may build of a file, for a while."""

from __future__ import annotations

import pickle
import signal
from argparse import Namespace
from pathlib import PosixPath

import pytest
import torch
from torch import serialization

from megatron_npu.safe_files import safe_load, torch_readers


@pytest.fixture
def allowed_before():
    """Namespace, which other tests may have let torch build already, and whatever they have besides."""
    with safe_load.allowing(Namespace):
        yield


def load(path, content):
    torch.save(content, path)
    return torch.load(path, weights_only=True)


def test_what_was_allowed_before_is_allowed_afterwards(tmp_path, allowed_before):
    """torch's own safe_globals forbids it then."""
    before = set(serialization.get_safe_globals())
    with safe_load.allowing(Namespace, signal.Signals):
        assert load(tmp_path / "a", [Namespace(a=1), signal.SIGINT]) == [Namespace(a=1), signal.SIGINT]
    assert set(serialization.get_safe_globals()) == before
    assert load(tmp_path / "a", Namespace(a=2)).a == 2


def test_alone_forbids_the_others(tmp_path, allowed_before):
    with safe_load.allowing(PosixPath, alone=True), pytest.raises(pickle.UnpicklingError, match="Namespace"):
        load(tmp_path / "a", Namespace(a=1))


def test_an_error_does_not_leave_anything_allowed(allowed_before):
    before = set(serialization.get_safe_globals())
    with pytest.raises(ZeroDivisionError), safe_load.allowing(PosixPath):
        raise ZeroDivisionError
    assert set(serialization.get_safe_globals()) == before


def test_a_part_of_a_flat_buffer_is_read(tmp_path):
    """A local checkpoint of the scripts of up to 0.15 holds the slice of each tensor of its optimizer."""
    torch.save({"flattened_range": slice(2, 5)}, tmp_path / "a")
    with (tmp_path / "a").open("rb") as stream:
        assert torch_readers._load_value(stream) == {"flattened_range": slice(2, 5)}
    read = safe_load.read(tmp_path / "a", safe_load.OF_STOCK_SCRIPTS)
    assert read["flattened_range"].given == (2, 5, None)
