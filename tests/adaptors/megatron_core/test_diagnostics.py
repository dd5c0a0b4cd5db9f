"""Instruments of a training run: stragglers, statistics of reruns, figures and history of memory."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from megatron_npu.base.errors import LoaderWorkerError
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")
MEBIBYTE = 2**20


@pytest.fixture
def detector():
    from megatron.core.utils import StragglerDetector

    StragglerDetector._configured = False
    detector = StragglerDetector()
    detector.configure(world=1, rank=0, port=0, prefill=2, enabled=True)
    yield detector
    detector.sock.close()
    StragglerDetector._configured = False


def test_the_straggler_detector_measures(detector) -> None:
    with detector:
        time.sleep(0.02)
    milliseconds, _, temperature, power, _, clock = detector.elapsed()
    assert milliseconds >= 20
    for figure in (temperature, power, clock):  # measured, or said to be unknown
        assert math.isnan(figure) or figure > 0
    with detector:
        time.sleep(0.001)
    assert detector.report(total_flops=1e12, log_interval=1)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), LoaderWorkerError("DataLoader worker")])
def test_an_end_in_one_line_where_the_straggler_detector_is_on_is_no_traceback(detector, caplog, end) -> None:
    with pytest.raises(type(end)), detector:
        raise end
    assert not caplog.text
    with pytest.raises(ValueError, match="lost"), detector:
        raise ValueError("lost")
    assert "ValueError: lost" in caplog.text


def test_figures_of_memory_follow_what_is_allocated() -> None:
    torch.cuda.empty_cache()  # what earlier tests have freed would be used again, and nothing would grow
    before = torch.cuda.memory_allocated()
    # on a cpu much more than what the kernel may take from this process meanwhile
    held = torch.ones(256 * MEBIBYTE // 4, device=here())
    now = torch.cuda.memory_allocated()
    assert now - before >= 60 * MEBIBYTE
    assert torch.cuda.max_memory_allocated() >= now
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.peak"] >= statistics["allocated_bytes.all.current"] > 60 * MEBIBYTE
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert held.nbytes <= torch.cuda.device_memory_used() <= total


@pytest.mark.skipif("here().type == 'cpu'", reason="the case: refused there")
def test_the_history_of_memory_is_recorded(tmp_path: Path) -> None:
    """The calls of ``model_provider`` (0.16) and ``pretrain_gpt`` (0.12)."""
    torch.cuda.memory._record_memory_history(
        True, trace_alloc_max_entries=1000, trace_alloc_record_context=True
    )
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: None)
    held = torch.ones(3 * MEBIBYTE, device=here())
    events = [event for trace in torch.cuda.memory._snapshot()["device_traces"] for event in trace]
    torch.cuda.memory._record_memory_history(None)
    assert any(event["action"] == "alloc" and event["size"] >= held.nbytes for event in events)


def test_statistics_of_reruns_name_the_call() -> None:
    """0.16 asks a caller for the file and line that it no longer has."""
    import pickle

    from megatron.core.rerun_state_machine import Caller

    caller = Caller("loss is nan", 0)
    assert caller.filename == "'loss is nan'"
    assert pickle.loads(pickle.dumps(caller)) == caller
