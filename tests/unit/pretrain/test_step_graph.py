"""A step as one CUDA graph: when it is captured, what it reads, what is refused; the graph is a stand-in.

That the real one gives the losses of single kernels is what ``benchmarks/gpu_losses.py`` shows on a GPU.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import arguments, validation
from megatron_npu.pretrain.flags.checks import step_graph as checks
from megatron_npu.pretrain.run import step_graph

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 99 --cuda-graph-impl local"
).split()
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]


class Recorded:
    """Repeats what ran while it was recorded, on the same tensors."""

    making: Recorded | None = None

    def __init__(self) -> None:
        self.kernels: list = []

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel()


@pytest.fixture
def recorded(monkeypatch):
    @contextlib.contextmanager
    def graph(graph, **_):
        Recorded.making = graph
        yield
        Recorded.making = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


class Device:
    """Sums each micro batch, as a kernel that can be recorded; counts the calls from the host."""

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, *, data_iterator, num_microbatches, forward_only):
        self.calls += 1
        outputs = []
        for _ in range(num_microbatches):
            tokens, output = next(data_iterator)["tokens"], torch.zeros(1)
            kernel = self.kernel(tokens, output)
            Recorded.making.kernels.append(kernel) if Recorded.making else kernel()
            outputs.append(output)
        return outputs

    @staticmethod
    def kernel(tokens, output):
        return lambda: output.copy_(tokens.sum())


def batches():
    number = 0
    while True:
        number += 1
        yield {"tokens": torch.full((2,), float(number)), "attention_mask": None}


def sums(graph, data, count):
    return (
        torch.stack(graph(data_iterator=data, num_microbatches=count, forward_only=False)).flatten().tolist()
    )


def test_it_is_captured_once_and_reads_each_steps_data(recorded):
    device, data = Device(), batches()
    graph = step_graph.StepGraph(device.compute)
    found = [sums(graph, data, 2) for _ in range(7)]
    assert found == [[2.0 * n, 2.0 * n + 2] for n in range(1, 15, 2)]
    assert device.calls == step_graph.WARM_UP + 1


def test_another_number_of_micro_batches_is_another_graph(recorded):
    device, data = Device(), batches()
    graph = step_graph.StepGraph(device.compute)
    for _ in range(5):
        sums(graph, data, 1)
    assert [sums(graph, data, 2) for _ in range(5)][-1] == [28.0, 30.0]
    assert device.calls == 2 * (step_graph.WARM_UP + 1)


def test_an_evaluation_runs_as_it_is(recorded):
    device = Device()
    graph = step_graph.StepGraph(device.compute)
    for _ in range(6):
        graph(data_iterator=batches(), num_microbatches=1, forward_only=True)
    assert device.calls == 6


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], "--attention-dropout above 0"),
        ([*NO_DROPOUT, "--fp16"], "--fp16"),
        ([*NO_DROPOUT, "--recompute-granularity", "full"], "--recompute-granularity"),
    ],
)
def test_what_differs_from_step_to_step_is_refused(monkeypatch, more, named):
    args = arguments.parse([*FLAGS, *more])
    args.fully_sharded = None
    monkeypatch.setattr(type(devices.current()), "name", "cuda")
    with pytest.raises(UsageError, match=f"--cuda-graph-impl local cannot be used with {named}"):
        checks.check(args)


def test_a_device_without_graphs_says_so_and_trains(caplog):
    flags = validation.check(arguments.parse([*FLAGS, *NO_DROPOUT]))
    assert flags.cuda_graph_impl == "none"
    assert "--cuda-graph-impl local does nothing: there are no CUDA graphs on the cpu device" in caplog.text
