"""Texts are the same in every layout: one process, tensor, sequence, pipeline and context parallel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import tiny

pytest.importorskip("megatron.core")

WORKER = Path(__file__).parent / "sampler_worker.py"
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS = {
    "tensor": {TENSOR: 2},
    "sequence": {TENSOR: 2, "sequence_parallel": True},
    "pipeline": {PIPELINE: 2},
    "interleaved": {PIPELINE: 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
}


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    flags = [*tiny.flags_for(dataset), "--num-layers", "4", "--train-iters", "20", "--eval-iters", "0"]
    done = tiny.run("pretrain", *flags, "--save", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def drawn(trained: Path, output: Path, layouts: dict[str, dict], processes: int) -> list[dict[str, dict]]:
    """Return what each rank draws, and what it thinks of the prompts, in each layout."""
    launcher = tiny.torchrun(processes) if processes > 1 else []
    argv = [sys.executable, *launcher, str(WORKER), str(trained), str(output), json.dumps(layouts)]
    done = tiny.run_python(argv)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(processes)]


def test_every_rank_of_every_layout_draws_what_one_process_draws(trained, tmp_path):
    ((one,),) = (found.values() for found in drawn(trained, tmp_path / "one", {"alone": {}}, 1))
    alone, scores = one["texts"], one["scores"]
    assert len({tuple(ids) for ids, _ in alone}) > 6
    assert alone[4 + 2][1], "the watcher ends the third text"
    assert [len(logprobs) for logprobs, _ in scores] == [2, 0, 5, 2]
    for found in drawn(trained, tmp_path / "two", LAYOUTS, 2):
        assert {name: some["texts"] for name, some in found.items()} == dict.fromkeys(LAYOUTS, alone)
        scored = [name for name, some in found.items() if some["scores"] is not None]
        assert scored == ["tensor", "pipeline", "interleaved", "data"]
        for name in scored:
            for (logprobs, greedy), (expected, known) in zip(found[name]["scores"], scores, strict=True):
                assert logprobs == pytest.approx(expected, abs=1e-5)
                assert greedy == known
