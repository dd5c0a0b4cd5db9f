"""What ``tests.sim.dry_grid`` trains: a small model in each layout, by the driver and by stock scripts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_npu.planning.job import Job
from tests.support import stock_lm

CHECKOUTS = Path(__file__).resolve().parents[2] / "checkouts"
DRIVER = "driver"
_SIZES = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
_SIZES += "--max-position-embeddings 128 --micro-batch-size 2 --lr 1e-4 --train-iters 2 --log-interval 1"
_MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --no-check-for-nan-in-loss-and-grad"
_BASE = f"{_SIZES} {_MOCK} --eval-iters 0 --num-workers 0"
# upstream's mock data has tokens up to 4,096; and 0.16.1 needs an interval
_STOCK = "--vocab-size 5000 --eval-interval 100".split()
LLAMA = (
    "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
)
_MLA = (
    "--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --position-embedding-type rope"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP2, SHARED = "--context-parallel-size 2 --attention-dropout 0", "--use-distributed-optimizer"
_OF_DRIVER = {  # processes, words
    "gpt": (1, "--bf16"),
    "gpt-fp32": (1, ""),
    "gpt-recompute": (1, f"--bf16 {RECOMPUTE}"),
    "gpt-recompute-block": (1, f"--bf16 {_BLOCK}"),
    "gpt-recompute-selective": (1, "--bf16 --recompute-granularity selective"),
    "llama": (1, LLAMA),
    "llama-recompute": (1, f"{LLAMA} {RECOMPUTE}"),
    "experts": (1, EXPERTS),
    "mla": (1, _MLA),
    "llama-mtp": (1, f"{LLAMA} --mtp-num-layers 1"),
    "gpt-tp2": (2, f"--bf16 {TP2}"),
    "gpt-tp2-recompute": (2, f"--bf16 {TP2} {RECOMPUTE}"),
    "llama-tp2-sp": (2, f"{LLAMA} {TP2} --sequence-parallel"),
    "gpt-pp2": (2, f"--bf16 {PP2}"),
    "llama-pp2-interleaved": (2, f"{LLAMA} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "gpt-dp2": (2, "--bf16"),
    "llama-dp2-distributed": (2, f"{LLAMA} {SHARED}"),
    "gpt-dp2-overlapped": (2, f"--bf16 {SHARED} --overlap-grad-reduce --overlap-param-gather"),
    "llama-cp2": (2, f"{LLAMA} {CP2}"),
    "llama-cp2-distributed": (2, f"{LLAMA} {CP2} {SHARED}"),
    "experts-ep2": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "experts-ep2-grouped": (2, f"{EXPERTS} --expert-model-parallel-size 2 --moe-grouped-gemm {SHARED}"),
    "llama-tp2-pp2-dp2": (8, f"{LLAMA} {TP2} --sequence-parallel {PP2} {SHARED}"),
    "llama-tp2-cp2-pp2": (8, f"{LLAMA} {TP2} --sequence-parallel {PP2} {CP2} {SHARED}"),
}
_OF_STOCK = {
    "gpt": (1, "--bf16"),
    "gpt-tp2": (2, f"--bf16 {TP2}"),
    "gpt-pp2": (2, f"--bf16 {PP2}"),
    "gpt-dp2-distributed": (2, f"--bf16 {SHARED}"),
}
_OF_CORE = {
    "llama-tp2-sp": (2, f"{LLAMA} {TP2} --sequence-parallel"),
    "llama-recompute": (1, f"{LLAMA} {RECOMPUTE}"),
}
_CORES = ("core_v0.12.1", "core_v0.16.1", "core_v0.19.0", "core_main_d98e8a64")
_OF_DEEPSPEEDAI = {"gpt-dp2-zero2": (2, "ZERO 2"), "gpt-dp2-zero3": (2, "ZERO 3")}
_OF_DEEPSPEED = {
    "gpt": (1, "--bf16"),
    "gpt-tp2": (2, f"--bf16 {TP2}"),
    "gpt-dp2-zero1": (2, "ZERO 1"),
}


@dataclass(frozen=True)
class Layout:
    """A training of so many ranks.

    Attributes:
        program: ``DRIVER``, or the folder of ``checkouts`` whose pretrain_gpt.py trains.
        name: of the layout.
        ranks: how many processes there are.
        flags: those of the model and the layout.
    """

    program: str
    name: str
    ranks: int
    flags: str

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return Job(self.ranks, (), tuple(self.flags.split())).data

    def command(self, folder: Path) -> list[str]:
        """Return the words of its command line; what they name is written into ``folder``."""
        # two micro batches: `plan` leaves none out
        batch = ["--global-batch-size", str(4 * self.data)]
        if self.program == DRIVER:
            return ["pretrain", *_BASE.split(), *self.flags.split(), *batch]
        start = ["run", str(CHECKOUTS / self.program / "pretrain_gpt.py")]
        if self.program in _CORES:
            return [*start, *_BASE.split(), *self.flags.split(), *batch, *_STOCK]
        stock_lm.write_data(folder)
        words = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt --data-path {folder}/text"
        given = self.flags.split()
        if given[:1] == ["ZERO"]:
            given = _engine(folder, int(given[1]), 4 * self.data)
        return [
            *start,
            *_SIZES.split(),
            *words.split(),
            "--eval-iters",
            "0",
            "--num-workers",
            "0",
            *given,
            *batch,
        ]


def _engine(folder: Path, stage: int, batch: int) -> list[str]:
    path = folder / "engine.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": batch}
    more = {"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    path.write_text(json.dumps(sizes | more))
    # a pipeline of DeepSpeed shards the optimizer's states alone
    alone = ["--no-pipeline-parallel"] * (stage > 1)
    return [*alone, "--bf16", "--deepspeed", "--deepspeed_config", str(path), "--zero-stage", str(stage)]


def _all() -> dict[str, Layout]:
    programs = {DRIVER: _OF_DRIVER, "285068c8": _OF_STOCK}
    programs |= dict.fromkeys(_CORES, _OF_STOCK | _OF_CORE)
    programs |= {"8387ae17": _OF_DEEPSPEED, "4efb479d": _OF_DEEPSPEED | _OF_DEEPSPEEDAI}
    return {
        name if program == DRIVER else f"{program}/{name}": Layout(program, name, ranks, flags)
        for program, layouts in programs.items()
        for name, (ranks, flags) in layouts.items()
    }


LAYOUTS = _all()
