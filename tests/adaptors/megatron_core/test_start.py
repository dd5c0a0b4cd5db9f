"""The start of a training run on a device without CUDA."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_npu.adaptors.megatron_core.run.start import allow_no_cuda
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")


def test_allow_no_cuda_may_be_positional(monkeypatch) -> None:
    """As the fourth argument of ``initialize_megatron``, or not given at all."""
    if here().type == "cuda":
        pytest.skip("the case: upstream's assertion holds there")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")

    def initialize_megatron(extra_args_provider=None, args_defaults=None, ignore=False, allow_no_cuda=False):
        return extra_args_provider, args_defaults, ignore, allow_no_cuda

    initialize = partial(allow_no_cuda, initialize_megatron)
    assert initialize(None, {}, True, False) == (None, {}, True, True)
    assert initialize(args_defaults={}) == (None, {}, False, True)


def test_streams_of_high_priority_are_those_of_devices_that_have_them():
    from megatron.core import parallel_state

    options = parallel_state.get_nccl_options("dp_cp", {"dp_cp": {"is_high_priority_stream": True}})
    assert options.is_high_priority_stream if here().type == "npu" else options is None
