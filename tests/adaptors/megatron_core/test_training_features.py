"""What surrounds a training step: checkpoint writers, instruments, figures of memory, tools of CUDA."""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_npu.errors import UsageError
from tests.adaptors.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")
MEBIBYTE = 2**20


def _staged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Bring tensors to the host as ``FileSystemWriterAsync.preload_tensors`` does."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def _write_when_told(rank: int, tensors: list[torch.Tensor], folder: Path) -> None:
    """Write the tensors, but not before training has gone on."""
    while not (folder / "go").exists():
        time.sleep(0.01)
    torch.save(tensors, folder / "written")


def test_a_persistent_writer_gets_the_weights_of_its_iteration(tmp_path: Path) -> None:
    """Stock hands over the training's own memory; on a cpu the checkpoint gets what training does later."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller

    weight = torch.zeros(1000, device=here())
    request = AsyncRequest(
        _write_when_told, (0, [weight], tmp_path), [], preload_fn=partial(_staged, [weight])
    )
    caller = PersistentAsyncCaller()
    try:
        caller.schedule_async_call(request)
        weight.add_(1)  # the next iteration
        (tmp_path / "go").touch()
        assert caller.is_current_async_call_done(blocking=True)
    finally:
        caller.close()
    assert torch.load(tmp_path / "written")[0].eq(0).all()


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


def test_figures_of_memory_follow_what_is_allocated() -> None:
    torch.cuda.empty_cache()  # what earlier tests have freed would be used again, and nothing would grow
    before = torch.cuda.memory_allocated()
    held = torch.ones(64 * MEBIBYTE // 4, device=here())
    assert torch.cuda.memory_allocated() - before >= 60 * MEBIBYTE
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.peak"] >= statistics["allocated_bytes.all.current"] > 60 * MEBIBYTE
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert held.nbytes <= torch.cuda.device_memory_used() <= total


def _arguments(**values) -> argparse.Namespace:
    plain = {"profile": False, "use_pytorch_profiler": False, "record_memory_history": False}
    return argparse.Namespace(**{**plain, **values})


def test_tools_of_cuda_are_refused_before_anything_is_built() -> None:
    from megatron_npu.adaptors.megatron_core.arguments import refuse_tools_of_cuda

    with pytest.raises(UsageError, match=f"--profile alone on the {here().type} device"):
        refuse_tools_of_cuda(_arguments(profile=True))
    both = _arguments(profile=True, use_pytorch_profiler=True)
    refuse_tools_of_cuda(both)
    assert both.profile
    history = _arguments(record_memory_history=True)
    if here().type == "cpu":
        with pytest.raises(UsageError, match="--record-memory-history on the cpu device"):
            refuse_tools_of_cuda(history)
    else:
        refuse_tools_of_cuda(history)
        assert history.record_memory_history


def test_the_checks_of_this_device_run_in_order_before_upstreams(monkeypatch) -> None:
    from megatron_npu.adaptors.megatron_core import arguments

    ran: list[str] = []

    def check(name: str, **options: Any) -> arguments.Check:
        return arguments.Check(lambda _: ran.append(name), why="a test", **options)

    others = tuple({"npu", "cuda", "cpu"} - {here().type})
    checks = (
        check("first", devices=(here().type,)),
        check("of other devices", devices=others),
        check("not needed", condition=lambda: "something is installed"),
        check("last", condition=lambda: None),
    )
    monkeypatch.setattr(arguments, "CHECKS", checks)

    def validate(args: argparse.Namespace, defaults: dict[str, int], *, strict: bool) -> tuple[Any, ...]:
        ran.append("upstream")
        return args, defaults, strict

    args = _arguments()
    assert arguments.validate_args(validate, args, {"seq_length": 8}, strict=True) == (
        args,
        {"seq_length": 8},
        True,
    )
    assert ran == ["first", "last", "upstream"]


def test_the_ledger_names_every_check_of_the_arguments() -> None:
    from megatron_npu.adaptors.megatron_core import arguments
    from megatron_npu.patching.registry import registry

    (patch,) = [one for one in registry.patches if one.target == "megatron.training.arguments:validate_args"]
    for check in arguments.CHECKS:
        assert check.name in patch.why
        assert check.why in patch.why
        assert not check.until or f"{check.name}: {check.until}" in patch.until


@pytest.mark.skipif("here().type == 'cpu'", reason="refused there")
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


def test_a_parameter_that_a_recomputed_function_returns_stays_a_leaf() -> None:
    """An MLP returns its bias unadded. Stock makes it an output of the checkpoint, which calls itself."""
    from megatron.core import tensor_parallel

    weight, bias = (torch.nn.Parameter(torch.randn(shape, device=here())) for shape in ((4, 4), (4,)))
    x = torch.randn(3, 4, device=here(), requires_grad=True)

    def mlp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ weight, bias

    gradients = []
    for output, unadded in (mlp(x), tensor_parallel.checkpoint(mlp, False, x)):
        assert bias.is_leaf  # or the backward pass below never ends
        (output + unadded).square().sum().backward()
        gradients.append([tensor.grad.clone() for tensor in (x, weight, bias)])
        x.grad = weight.grad = bias.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.skipif("here().type == 'cuda'", reason="upstream's assertion holds there")
def test_allow_no_cuda_may_be_positional(monkeypatch) -> None:
    """As the fourth argument of ``initialize_megatron``, or not given at all."""
    from megatron_npu.adaptors.megatron_core.start import allow_no_cuda

    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")

    def initialize_megatron(extra_args_provider=None, args_defaults=None, ignore=False, allow_no_cuda=False):
        return extra_args_provider, args_defaults, ignore, allow_no_cuda

    initialize = partial(allow_no_cuda, initialize_megatron)
    assert initialize(None, {}, True, False) == (None, {}, True, True)
    assert initialize(args_defaults={}) == (None, {}, False, True)
