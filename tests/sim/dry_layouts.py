"""What ``tests.sim.dry_grid`` trains: a small model in each layout, by the driver and by stock scripts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_npu.planning.job import Job
from tests.support import layout_words, stock_lm
from tests.support.layout_words import CP2, EP2, GATED, INTERLEAVED, PP2, RECOMPUTE, SEQUENCE, SHARED, TP2

CHECKOUTS = Path(__file__).resolve().parents[2] / "checkouts"
DRIVER, TRAIN = "driver", "train"
_SIZES = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
_SIZES += "--max-position-embeddings 128 --micro-batch-size 2 --lr 1e-4 --train-iters 2 --log-interval 1"
_MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --no-check-for-nan-in-loss-and-grad"
_BASE = f"{_SIZES} {_MOCK} --eval-iters 0 --num-workers 0"
# upstream's mock data has tokens up to 4,096; and 0.16.1 needs an interval
_STOCK = "--vocab-size 5000 --eval-interval 100".split()
LLAMA = f"{layout_words.LLAMA} 2"
EXPERTS = f"{LLAMA} {layout_words.EXPERTS}"
_MLA = (
    f"--bf16 {GATED} --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32"
)
_BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
_SELECTIVE = "--recompute-granularity selective"
_PARTS = f"{_SELECTIVE} --recompute-modules core_attn layernorm mlp"
_LATENT = f"{_MLA} --mtp-num-layers 1"
_OFFLOADED = (
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 1024 "
    "--offload-modules core_attn attn_proj qkv_linear"
)
_OF_PRETRAIN = {  # processes, words; of every megatron-core
    "gpt": (1, "--bf16"),
    "gpt-recompute-block": (1, f"--bf16 {_BLOCK}"),
    "gpt-recompute-selective": (1, f"--bf16 {_SELECTIVE}"),
    "llama-recompute": (1, f"{LLAMA} {RECOMPUTE}"),
    "experts": (1, EXPERTS),
    "mla": (1, _MLA),
    "llama-mtp": (1, f"{LLAMA} --mtp-num-layers 1"),
    "gpt-tp2-recompute": (2, f"--bf16 {TP2} {RECOMPUTE}"),
    "llama-tp2-sp": (2, f"{LLAMA} {SEQUENCE}"),
    "gpt-pp2": (2, f"--bf16 {PP2}"),
    "llama-pp2-interleaved": (2, f"{LLAMA} {INTERLEAVED}"),
    "llama-dp2-distributed": (2, f"{LLAMA} {SHARED}"),
    "llama-cp2": (2, f"{LLAMA} {CP2}"),
    "experts-ep2": (2, f"{EXPERTS} {EP2}"),
    "gpt-dp2-fsdp": (2, "--bf16 --fsdp-memory-optimization"),
    "gpt-dp2-swapped": (2, f"--bf16 {SHARED} --swap-optimizer"),
}
_FREE = f"{LLAMA} {layout_words.FREE_EXPERTS}"
_OF_DRIVER = _OF_PRETRAIN | {  # of the megatron-core that is installed, besides
    "gpt-fp32": (1, ""),
    "gpt-recompute": (1, f"--bf16 {RECOMPUTE}"),
    "llama": (1, LLAMA),
    "llama-recompute-parts": (1, f"{LLAMA} {_PARTS}"),
    "llama-offloaded": (1, f"{LLAMA} {_OFFLOADED}"),
    "gpt-cpu-offload": (1, "--bf16 --cpu-offload"),
    "gpt-tp2": (2, f"--bf16 {TP2}"),
    "mla-mtp-tp2-sp": (2, f"{_LATENT} {SEQUENCE}"),
    "mla-mtp-pp2": (2, f"{_LATENT} {PP2}"),
    "gpt-dp2": (2, "--bf16"),
    "gpt-dp2-zero1": (2, "--bf16 --zero-1-memory-optimization"),
    "gpt-dp2-zero2": (2, "--bf16 --zero-2-memory-optimization"),
    "gpt-dp2-zero3": (2, "--bf16 --zero-3-memory-optimization"),
    "gpt-dp2-overlapped": (2, f"--bf16 {SHARED} --overlap-grad-reduce --overlap-param-gather"),
    "llama-cp2-distributed": (2, f"{LLAMA} {CP2} {SHARED}"),
    "llama-cp2-ulysses": (2, f"{LLAMA} {CP2} --cp-comm-type a2a"),
    "experts-ep2-grouped": (2, f"{EXPERTS} {EP2} --moe-grouped-gemm {SHARED}"),
    "experts-free": (1, _FREE),
    "experts-ep2-free": (2, f"{_FREE} {EP2} --moe-grouped-gemm --moe-permute-fusion"),
    "experts-ep2-uneven": (2, f"{_FREE} {EP2} --moe-grouped-gemm --moe-permute-fusion"),
    "experts-tp2-ep2": (4, f"{EXPERTS} {EP2} {SEQUENCE}"),
    "llama-tp2-pp2-dp2": (8, f"{LLAMA} {SEQUENCE} {PP2} {SHARED}"),
    "llama-tp2-cp2-pp2": (8, f"{LLAMA} {SEQUENCE} {PP2} {CP2} {SHARED}"),
}
# of the tokens of an even share, what the experts of each rank get; without it an even share
_UNEVEN = {"experts-ep2-uneven": (1.5, 0.5)}
_OF_STOCK = {
    "gpt": (1, "--bf16"),
    "gpt-tp2": (2, f"--bf16 {TP2}"),
    "gpt-pp2": (2, f"--bf16 {PP2}"),
    "gpt-dp2-distributed": (2, f"--bf16 {SHARED}"),
    "gpt-tp2-sp": (2, f"--bf16 {SEQUENCE}"),
    "gpt-recompute": (1, f"--bf16 {RECOMPUTE}"),
    "gpt-tp2-pp2": (4, f"--bf16 {TP2} {PP2}"),
    "gpt-tp2-dp2-distributed": (4, f"--bf16 {TP2} {SHARED}"),
}
_OF_CORE = {
    "gpt-recompute-selective": (1, f"--bf16 {_SELECTIVE}"),
    "llama-tp2-sp": (2, f"{LLAMA} {SEQUENCE}"),
    "llama-recompute": (1, f"{LLAMA} {RECOMPUTE}"),
    "llama-cp2": (2, f"{LLAMA} {CP2}"),
    "llama-pp2-interleaved": (2, f"{LLAMA} {INTERLEAVED}"),
    "llama-mtp": (1, f"{LLAMA} --mtp-num-layers 1"),
    "mla": (1, _MLA),
    "experts-ep2": (2, f"{EXPERTS} {EP2}"),
    "gpt-dp2-fsdp2": (
        2,
        "--bf16 --use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights",
    ),
    "gpt-dp2-offload": (
        2,
        f"--bf16 {SHARED} --optimizer-cpu-offload --use-precision-aware-optimizer",
    ),
}
_OF_TRAIN = {
    "gpt2": (1, ""),
    "gpt2-bf16": (1, "--mixed-precision"),
    "gpt2-recompute": (1, "--mixed-precision --checkpoint-activations"),
    "gpt2-fused": (1, "--mixed-precision --fused-ops"),
    "gpt2-dp2": (2, "--mixed-precision"),
    **{
        f"gpt2-dp2-{name}": (2, f"--mixed-precision --{name}-memory-optimization")
        for name in ("zero-1", "zero-2", "zero-3", "fsdp")
    },
}
_CORES = ("core_v0.12.1", "core_v0.16.1", "core_v0.19.0", "core_main_d98e8a64")
_WHEELS = ("megatron_core-0.12.1", "megatron_core-0.19.2")
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
        program: ``DRIVER``, or a folder of ``checkouts``: a megatron-core that the driver trains with, or a
            tree whose pretrain_gpt.py trains.
        name: of the layout.
        ranks: how many processes there are.
        flags: those of the model and the layout.
    """

    program: str
    name: str
    ranks: int
    flags: str

    def imbalance(self, rank: int) -> float:
        """Return the tokens for the experts of a rank, as a multiple of an even share."""
        return _UNEVEN[self.name][rank] if self.name in _UNEVEN else 1.0

    @property
    def kind(self) -> str:
        """Of the program: ``driver``, ``train`` or ``stock``."""
        if self.program == TRAIN:
            return "train"
        return "driver" if self.program == DRIVER or self.program in _WHEELS else "stock"

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return Job(self.ranks, (), tuple(self.flags.split())).data

    def command(self, folder: Path) -> list[str]:
        """Return the words of its command line; what they name is written into ``folder``."""
        # two micro batches: `plan` leaves none out
        batch = ["--global-batch-size", str(4 * self.data)]
        if self.kind == "driver":
            # the mock data of 0.12.1 ignore the vocabulary, those of 0.19 do not
            more = ["--vocab-size", "5000"] * (self.program == "megatron_core-0.12.1")
            return ["pretrain", *_BASE.split(), *self.flags.split(), *batch, *more]
        if self.program == TRAIN:
            return ["train", *_transformer(folder), *self.flags.split(), *batch]
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


def _transformer(folder: Path) -> list[str]:
    """Return the words of a training of a GPT-2, of texts that are equally long; it evaluates nothing."""
    from tests.support import tiny_models

    sizes = {"n_embd": 128, "n_positions": 128}
    model = folder / "model"
    if not model.exists():
        tiny_models.gpt2(model, **sizes)
    data = folder / "text.jsonl"
    data.write_text((json.dumps({"text": "the cat saw a dog " * 20}) + "\n") * 40)
    words = f"--task causal_lm --pretrained-model-name-or-path {model} --data-path {data} --seq-length 64"
    return [*words.split(), *"--micro-batch-size 2 --train-iters 3 --exit-interval 2 --no-plot".split()]


def _engine(folder: Path, stage: int, batch: int) -> list[str]:
    path = folder / "engine.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": batch}
    more = {"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    path.write_text(json.dumps(sizes | more))
    # a pipeline of DeepSpeed shards the optimizer's states alone
    alone = ["--no-pipeline-parallel"] * (stage > 1)
    return [*alone, "--bf16", "--deepspeed", "--deepspeed_config", str(path), "--zero-stage", str(stage)]


def _all() -> dict[str, Layout]:
    programs = {DRIVER: _OF_DRIVER} | dict.fromkeys(_WHEELS, _OF_PRETRAIN)
    programs |= {TRAIN: _OF_TRAIN}
    programs |= {"285068c8": _OF_STOCK}
    programs |= dict.fromkeys(_CORES, _OF_STOCK | _OF_CORE)
    # its script passes disable_bucketing to a class that does not take it
    programs["core_v0.12.1"] = {
        name: layout for name, layout in programs["core_v0.12.1"].items() if name != "gpt-dp2-fsdp2"
    }
    programs |= {"8387ae17": _OF_DEEPSPEED, "4efb479d": _OF_DEEPSPEED | _OF_DEEPSPEEDAI}
    return {
        name if program == DRIVER else f"{program}/{name}": Layout(program, name, ranks, flags)
        for program, layouts in programs.items()
        for name, (ranks, flags) in layouts.items()
    }


LAYOUTS = _all()
