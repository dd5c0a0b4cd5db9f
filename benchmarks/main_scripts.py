"""Train with the scripts of Megatron-LM's main, on the CPU and on a simulated NPU, for ``main_numbers.py``.

The scripts print seven digits of a loss and four of a gradient norm. Since 0.17 the second loss line of a
process is the mean of its first two iterations.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import main_runs
from main_runs import TREE, Row

from tests.support import stock_core, tiny

STOCK = [*stock_core.FLAGS, *"--mock-data --vocab-size 1024 --eval-iters 0".split()]
HYBRID = [*STOCK[2:], *"--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec".split()]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
).split()
FSDP = "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion".split()
SHARDED = {
    "torch's FSDP2": "--use-torch-fsdp2 --ckpt-format torch_dcp",
    "Megatron-FSDP": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--use-distributed-optimizer --ckpt-format fsdp_dtensor",
}
MUON_PATH = os.pathsep.join([tiny.environment()["PYTHONPATH"], str(main_runs.OPTIMIZERS)])
MUON = "--optimizer muon --muon-fp32-matmul-prec high --lr 2e-2".split()
PARALLEL = {
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "TP 2, PP 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
SAVE, AFTER_TWO = ["--save-interval", "2"], ["--ckpt-step", "2"]


class Curve(NamedTuple):
    """The losses and gradient norms that a script has printed."""

    losses: list[float]
    norms: list[float]


def script(device: str, name: str, words: list[str], processes: int = 1, **variables: str) -> Curve:
    """Run a script of main to its end; scripts start as in the tests, from a parent with warm imports.

    Raises:
        RuntimeError: the script's exit code is not 0.
    """
    variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        done = stock_core.run_script(
            TREE, Path(folder), name, *words, processes=processes, device=device, **variables
        )
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(words)}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return Curve(stock_core.losses(done), stock_core.norms(done))


def compared(what: str, found: Curve, whole: Curve, first: int = 0) -> Row:
    """Compare a run with the part of another one that begins behind iteration ``first``."""
    losses = whole.losses[first : first + len(found.losses)]
    if first and len(losses) > 1:
        losses[1] = (losses[0] + losses[1]) / 2
    norms = whole.norms[first : first + len(found.norms)]
    differ = sum(a != b for a, b in zip(found.norms, norms, strict=False))
    row = {"what": what, "found": main_runs.deviation(found.losses, losses)}
    return {**row, "norms that differ": differ, "norms": len(found.norms), "losses": found.losses}


def _programs(folder: Path) -> dict[str, tuple[str, list[str], dict[str, str]]]:
    """Return script, flags and environment of each program, with the data that it reads in ``folder``."""
    sentences = stock_core.write_sentences(folder)
    common = [*sentences, *stock_core.SENTENCES, *"--train-iters 6 --eval-iters 0 --num-workers 0".split()]
    bert = [*common, *stock_core.LAYERS["pretrain_bert.py"], "--tokenizer-type", "BertWordPieceLowerCase"]
    t5 = [*common, *stock_core.LAYERS["pretrain_t5.py"], "--tokenizer-type", "BertWordPieceCase"]
    groups = ["--mamba-num-groups", "2"]  # as many as the small model has heads
    hybrid = [*HYBRID, "--hybrid-layer-pattern", "M*M-", *groups]
    return {
        "gpt": ("pretrain_gpt.py", STOCK, {}),
        "gpt, 4 experts": ("pretrain_gpt.py", [*STOCK, *EXPERTS], {}),
        "hybrid M*M-": ("pretrain_hybrid.py", hybrid, {"MEGATRON_NPU_TE": "local"}),
        "bert": ("examples/bert/pretrain_bert.py", bert, {}),
        "t5": ("examples/t5/pretrain_t5.py", t5, {}),
    }


def one_script(program: str, device: str, folder: Path) -> Iterator[Row]:
    """Train six iterations on the CPU, and the last four again on a device from its checkpoint.

    Both begin with the weights and the optimizer state that the CPU saved after two iterations.
    """
    name, words, variables = _programs(folder)[program]
    place = str(folder / "checkpoint")
    load = [*words, "--load", place, *AFTER_TWO, *([] if device == "cpu" else ["--no-load-rng"])]
    whole = script("cpu", name, [*words, "--save", place, *SAVE], 1, **variables)
    again = script(device, name, load, 1, **variables)
    yield compared(f"`{Path(name).name}` ({program})", again, whole, 2)


def parallel(layout: str, device: str, folder: Path) -> Iterator[Row]:
    """Train a GPT in several processes on a device, against one on the CPU, and interrupt and resume it.

    All runs begin with the weights and the optimizer state that one CPU process saved after two iterations.
    The resumed run begins with the checkpoint after four, and the checkpoints after six are compared.
    """
    processes, flags = PARALLEL[layout]
    start, once, twice = (folder / name for name in ("start", "once", "twice"))
    alone = script("cpu", "pretrain_gpt.py", [*STOCK, "--save", str(start), *SAVE])
    run = functools.partial(script, device, "pretrain_gpt.py", processes=processes)
    words = [*STOCK, *flags.split(), *SAVE]
    first = ["--load", str(start), *AFTER_TWO, *([] if device == "cpu" else ["--no-load-rng"])]
    whole = run([*words, *first, "--save", str(once)])
    yield compared(f"{layout}, against one process on the CPU", whole, alone, 2)
    again = run([*words, "--load", str(once), "--ckpt-step", "4", "--save", str(twice)])
    yield compared(f"{layout}, resumed", again, whole, 2)
    total, differ = main_runs.differing(once / "iter_0000006", twice / "iter_0000006", folder)
    yield {"what": f"{layout}, tensors of {total} that differ after an interruption", "found": differ}


def hybrid_and_gpt(device: str, folder: Path) -> Iterator[Row]:
    """Resume a GPT's checkpoint as a hybrid, and that hybrid's as a GPT."""
    gpt, hybrid = str(folder / "gpt"), str(folder / "hybrid")
    whole = script(device, "pretrain_gpt.py", [*STOCK, "--save", gpt, *SAVE])
    words = [*HYBRID, "--hybrid-layer-pattern", "*-*-", "--exit-interval", "4"]
    words += ["--load", gpt, *AFTER_TWO, "--save", hybrid, *SAVE]
    middle = script(device, "pretrain_hybrid.py", words, MEGATRON_NPU_TE="local")
    yield compared("a GPT's checkpoint resumed as a hybrid", middle, whole, 2)
    last = script(device, "pretrain_gpt.py", [*STOCK, "--load", hybrid])
    yield compared("that hybrid's checkpoint resumed as a GPT", last, whole, 4)


def sharded(name: str, device: str, folder: Path) -> Iterator[Row]:
    """Train with sharded data parallelism in two processes, against one without it, and resume."""
    words, place = [*STOCK, *FSDP, *SHARDED[name].split()], str(folder / "checkpoint")
    plain = script(device, "pretrain_gpt.py", [*STOCK, *FSDP])
    both = script(device, "pretrain_gpt.py", [*words, "--save", place, *SAVE], 2)
    yield compared(f"{name}, two processes against one without it", both, plain)
    again = script(device, "pretrain_gpt.py", [*words, "--load", place, *AFTER_TWO], 2)
    yield compared(f"{name}, resumed", again, both, 2)


def muon(device: str, folder: Path) -> Iterator[Row]:
    """Train with Muon in one process and in two, and resume."""
    words, place = [*STOCK, *MUON], str(folder / "muon")
    run = functools.partial(script, device, "pretrain_gpt.py", PYTHONPATH=MUON_PATH)
    whole = run([*words, "--save", place, *SAVE])
    yield compared("Muon, resumed", run([*words, "--load", place, *AFTER_TWO]), whole, 2)
    yield compared("Muon, two processes against one", run(words, 2), whole)


PROGRAMS = ("gpt", "gpt, 4 experts", "hybrid M*M-", "bert", "t5")
PARTS: dict[str, Callable[[str, Path], Iterator[Row]]] = {
    **{f"scripts: {name}": functools.partial(one_script, name) for name in PROGRAMS},
    **{f"parallel: {name}": functools.partial(parallel, name) for name in PARALLEL},
    "hybrid and gpt": hybrid_and_gpt,
    **{f"sharded: {name}": functools.partial(sharded, name) for name in SHARDED},
    "muon": muon,
}
