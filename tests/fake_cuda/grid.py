"""Every CUDA path that fake tensors can take: python -m tests.fake_cuda.grid [--output FILE] [NAME...]

The driver on each megatron-core, and the stock ``pretrain_gpt.py`` of each tree, train a step as the last
rank of each layout, and as the first of each pipeline. A rank's report says what it has run (``ranks.py``);
the exit code is 1 if one has ended otherwise than a rank on a GPU would. NAME is a folder in checkouts, or
``installed``; Megatron-DeepSpeed's trees have no part in it.

About a minute of a core for each Megatron. ``--output`` writes the reports as JSON, which
docs/explanation/cuda-without-a-gpu.md sums up; with ``--resume`` those ranks do not run again that have
trained according to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_npu.base import files
from tests.support import layout_words, stock_lm, tiny
from tests.support.layout_words import CP2, EP2, INTERLEAVED, LLAMA, PP2, RECOMPUTE, SEQUENCE, SHARED, TP2

ROOT = Path(__file__).resolve().parents[2]
CHECKOUTS = ROOT / "checkouts"
DEEPSPEED = ("4efb479d", "8387ae17")  # trees whose training is DeepSpeed's, which asks for the GPU itself
OLD = "285068c8"  # knows neither context nor expert parallelism, nor a tokenizer of numbers
LONGEST = 900  # seconds without the end of a rank, which takes some five when nothing else runs

MODEL = [
    *"--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64".split(),
    *"--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3".split(),
    *"--train-iters 1 --log-interval 1 --eval-interval 100 --eval-iters 0 --num-workers 0".split(),
    # what is read of a norm is 0, and the coefficient is limit / (norm + 1e-6): this one clips
    *"--split 90,10,0 --clip-grad 1e-9".split(),
]
NUMBERS = f"--tokenizer-type NullTokenizer --vocab-size {tiny.SIZE}".split()
# that there are data to train, validate and test on; in 285068c8 the shape of a batch, [b, s + 1]
RECEIVED = [[1, 1, 1], [1, 65, 0, 0, 0]]
EXPERTS = f"{layout_words.EXPERTS} --disable-bias-linear"
EVERYWHERE = {  # processes, words
    "one-fp32": (1, ""),
    "one-bf16": (1, "--bf16"),
    "one-fp16": (1, "--fp16"),
    "tp2": (2, f"--bf16 {TP2}"),
    "tp2-sp": (2, f"--bf16 {SEQUENCE}"),
    "pp2": (2, f"--bf16 {PP2}"),
    "pp2-interleaved": (2, f"--bf16 {INTERLEAVED}"),
    "dp2-distributed": (2, f"--bf16 {SHARED}"),
    "tp2-pp2-dp2": (8, f"--bf16 {SEQUENCE} {PP2} {SHARED}"),
    "recompute": (1, f"--bf16 {RECOMPUTE}"),
}
CORE = {
    "llama": (2, f"{LLAMA} 4 {SEQUENCE}"),
    "cp2": (2, f"--bf16 {CP2}"),
    "cp2-all-gather": (2, f"--bf16 {CP2} --cp-comm-type all_gather"),
    "cp2-ulysses": (2, f"--bf16 {CP2} --cp-comm-type a2a"),
    "ep2": (2, f"--bf16 {EXPERTS} {EP2}"),
    "tp2-ep2": (4, f"--bf16 {EXPERTS} {EP2} {SEQUENCE}"),
    "tp2-cp2-pp2": (8, f"--bf16 {SEQUENCE} {CP2} {PP2} {SHARED}"),
}
# what the driver's flags choose besides, with the megatron-core that it is installed with
INSTALLED = {
    "linear-loss": (
        2,
        f"--bf16 {SEQUENCE} --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
    ),
    "latent": (
        2,
        f"--bf16 {SEQUENCE} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 "
        "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope "
        "--normalization RMSNorm --swiglu --disable-bias-linear",
    ),
    "prediction": (2, f"--bf16 {TP2} --mtp-num-layers 1 --position-embedding-type rope"),
    "ep2-fused": (
        2,
        f"--bf16 {EXPERTS} {EP2} --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion",
    ),
    "dp2-precision-aware": (
        2,
        "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16",
    ),
    "dp2-reused-fp32": (2, "--bf16 --use-distributed-optimizer --reuse-fp32-param"),
    "window": (1, "--bf16 --pre-tockens 16 --attention-dropout 0"),
    # a generator of CUDA, which the drawing of sinks' dropout asks for, needs CUDA's own library
    "sinks": (1, "--bf16 --softmax-type learnable --attention-dropout 0"),
    "recomputed-parts": (
        2,
        f"--bf16 {SEQUENCE} --swiglu --recompute-granularity selective "
        "--recompute-modules core_attn layernorm mlp",
    ),
    "cp4-hierarchical": (
        4,
        "--bf16 --context-parallel-size 4 --attention-dropout 0 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2",
    ),
}

# Words of layouts that fake tensors do not get through. In 285068c8 pipelines fail, perhaps for fake shapes,
# and the distributed optimizer copies a storage; 0.12.1 selects by a mask even where experts have a capacity.
BEYOND_FAKE = {OLD: (PP2, SHARED), "0.12.1": ("--num-experts",)}


def cases(folder: Path, tree: Path | None, layouts: dict[str, tuple[int, str]]) -> list[dict]:
    """Return the last rank of each layout, of a pipeline the first too, as ``ranks.py`` takes them."""
    start = ["pretrain"] if tree is None else ["run", str(tree / "pretrain_gpt.py")]
    words = [*start, *MODEL, "--data-path", str(folder / "text")]
    if tree is not None:
        words += ["--timing-log-option", "all"]  # the others look for times that are not 0
    if tree is not None and tree.name != OLD:  # a mask's values say which tokens are one document
        words.append("--no-create-attention-mask-in-dataloader")
    if tree is not None and tree.name == OLD:
        vocabulary, merges = stock_lm.write_vocabulary(folder)
        words += ["--vocab-file", str(vocabulary), "--merge-file", str(merges)]
    else:
        words += NUMBERS
    return [
        {
            "name": f"{name}-rank{rank}",
            "rank": rank,
            "ranks": ranks,
            "received": RECEIVED,
            "words": [*words, *changes.split()],
        }
        for name, (ranks, changes) in layouts.items()
        for rank in sorted({0 if PP2 in changes else ranks - 1, ranks - 1})
    ]


def run(folder: Path, listed: list[dict], path: Path | None) -> dict[str, dict]:
    """Run cases with the Megatron in ``path``; return reports by name, of the failed the end of their log."""
    if not (folder / "text.idx").exists():
        tiny.write_dataset(folder / "text")
    (folder / "cases.json").write_text(json.dumps(listed))
    for case in listed:
        (folder / f"{case['name']}.json").unlink(missing_ok=True)
    places = [str(ROOT), *([str(path)] if path else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    environment |= {"MEGATRON_LM_PATH": str(path)} if path else {}
    command = [sys.executable, "-m", "tests.fake_cuda.ranks", str(folder / "cases.json"), str(folder)]
    ranks = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        _wait(ranks, lambda: sum((folder / f"{case['name']}.json").exists() for case in listed))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return {case["name"]: _report(folder, case["name"]) for case in listed}


def _wait(process: subprocess.Popen, ended: Callable[[], int], longest: float = LONGEST) -> None:
    """Wait until a process ends, or until no more have ended for ``longest`` seconds.

    Raises:
        subprocess.CalledProcessError: it has failed.
    """
    seen = 0
    while True:
        try:
            if process.wait(longest):
                raise subprocess.CalledProcessError(process.returncode, process.args)
            return
        except subprocess.TimeoutExpired:
            before, seen = seen, ended()
            if seen == before:
                return


def _report(folder: Path, name: str) -> dict:
    path = folder / f"{name}.json"
    report = json.loads(path.read_text()) if path.exists() else {"exit_code": None}
    if report["exit_code"] != 0:
        log = folder / f"{name}.log"
        report["failed"] = log.read_text().splitlines()[-8:] if log.exists() else ["has not begun"]
    return report


def wrong(report: dict) -> str | None:
    """Return what a rank's report says that a rank on a GPU would not, or None."""
    if report["exit_code"] != 0:
        return "\n    ".join([f"exit code {report['exit_code']}", *report["failed"]])
    if not (report["gradients"] and report["optimizer_steps"] and report["elements_updated"]):
        return "nothing was trained"
    return None if "0 drifted" in report["ledger"] else report["ledger"]


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.resume and not options.output:
        parser.error("--resume: expected --output FILE, which says what has trained")
    trees = [
        path.parent for path in sorted(CHECKOUTS.glob("*/megatron")) if path.parent.name not in DEEPSPEED
    ]
    found = {path.name: path for path in trees} | {"installed": None}
    resumed = options.resume and options.output.exists()
    reports = json.loads(options.output.read_text()) if resumed else {}
    for name in options.name or found:
        with tempfile.TemporaryDirectory() as folder:
            reports[name] = _of(Path(folder), name, found[name], options.layout, reports.get(name, {}))
        for case, report in reports[name].items():
            print(f"{name:22} {case:24} {wrong(report) or 'trained'}", flush=True)
        if options.output:
            files.write(options.output, json.dumps(reports, indent=1) + "\n")
    return any(wrong(report) for each in reports.values() for report in each.values())


def _of(
    folder: Path, name: str, path: Path | None, chosen: list[str] | None, known: dict[str, dict]
) -> dict[str, dict]:
    """Run the layouts of one Megatron: a tree has ``pretrain_gpt.py``, a wheel has the driver.

    Args:
        folder: for their files.
        name: of the Megatron.
        path: where it is; None for the installed one.
        chosen: these layouts; None for all.
        known: reports of ranks by name, of which those that have trained stay as they are.
    """
    layouts = EVERYWHERE if name == OLD else EVERYWHERE | CORE
    layouts |= INSTALLED if path is None else {}
    beyond = BEYOND_FAKE.get(name.removeprefix("megatron_core-").removeprefix("core_v"), ())
    layouts = {key: each for key, each in layouts.items() if not any(word in each[1] for word in beyond)}
    if chosen:
        layouts = {key: value for key, value in layouts.items() if key in chosen}
    tree = path if path is not None and (path / "pretrain_gpt.py").is_file() else None
    trained = {case: report for case, report in known.items() if not wrong(report)}
    listed = [case for case in cases(folder, tree, layouts) if case["name"] not in trained]
    return trained | (run(folder, listed, path) if listed else {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", metavar="NAME")
    parser.add_argument("--layout", nargs="+")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true", help="leave out what --output says has trained")
    return parser


if __name__ == "__main__":
    sys.exit(main())
