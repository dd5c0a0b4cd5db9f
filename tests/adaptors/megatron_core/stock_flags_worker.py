"""Give each flag of a tree's own parser to it, one at a time, and print what became of it, as JSON.

Nothing is trained: the flags of a small GPT and the one that is tried are parsed, validated as a script does
it, with the checks of the plug-in, and made into a configuration, as in one process of the CPU, or in two
where a flag shares a model out.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import json
import os
import re
import sys
from unittest import mock

from megatron_npu import plugin

plugin.install()

import megatron.training  # noqa: E402, F401  before the module below, which it imports in its own order
from megatron.training import argument_utils, arguments  # noqa: E402

from megatron_npu.adaptors.megatron_core.options import unsupported_options  # noqa: E402
from megatron_npu.base.errors import UsageError  # noqa: E402

BASE = [
    *"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --bf16".split(),
    *"--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3".split(),
    *"--train-iters 6 --eval-interval 100 --eval-iters 1 --tokenizer-type NullTokenizer".split(),
    *"--vocab-size 1024".split(),
]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear".split()
GROUPED = [*EXPERTS, *"--moe-grouped-gemm --moe-token-dispatcher-type alltoall".split()]
SHARED = [*EXPERTS, *"--moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type alltoall".split()]
LATENT = ["--multi-latent-attention"]
SHARDED = ["--use-distributed-optimizer"]
FSDP = [
    *"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params".split(),
    *"--ckpt-format fsdp_dtensor --use-distributed-optimizer --no-gradient-accumulation-fusion".split(),
]
SAVE, LOAD = ["--save", "save", "--save-interval", "5"], ["--load", "load"]
# What stands beside a flag, by how it begins; the longest beginning counts. An entry is a whole name, too.
BESIDE: dict[str, list[str]] = {
    "--moe": EXPERTS,
    "--moe-shared": SHARED,
    "--moe-router-group-topk": [*EXPERTS, "--moe-router-num-groups", "2"],
    "--moe-router-num-groups": [*EXPERTS, "--moe-router-group-topk", "1"],
    "--moe-router-enable-expert-bias": [*EXPERTS, "--moe-router-score-function", "sigmoid"],
    "--moe-pad-expert-input-to-capacity": [*EXPERTS, "--moe-expert-capacity-factor", "1.0"],
    "--moe-expert-capacity-factor": [*EXPERTS, "--moe-token-dispatcher-type", "alltoall"],
    "--moe-grouped-gemm": EXPERTS,
    "--moe-mlp-glu": GROUPED,
    "--moe-single": GROUPED,
    "--moe-use-grouped": GROUPED,
    "--mla": LATENT,
    "--q-lora": LATENT,
    "--kv-lora": LATENT,
    "--qk-head": LATENT,
    "--qk-pos": LATENT,
    "--v-head": LATENT,
    "--mscale": LATENT,
    "--cache-mla": LATENT,
    "--mtp": [*"--mtp-num-layers 1 --position-embedding-type rope".split()],
    "--mtp-num-layers": ["--position-embedding-type", "rope"],
    "--mtp-hybrid-override-pattern": [],
    "--fp8-format": [],
    "--fp4-format": [],
    "--expert-model-parallel-size": EXPERTS,
    "--overlap-moe": [
        *EXPERTS,
        *"--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split(),
    ],
    "--moe-router-topk": [*EXPERTS, "--moe-router-pre-softmax"],
    "--moe-use-upcycling": [*EXPERTS, "--save", "save"],
    "--cross-entropy-fusion-impl": ["--cross-entropy-loss-fusion"],
    "--defer-embedding": [*"--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights".split()],
    "--distribute-saved": [
        *"--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform".split(),
        *"--recompute-num-layers 1".split(),
    ],
    "--hybrid-context-parallel": [
        *"--rerun-mode disabled --context-parallel-size 2 --calculate-per-token-loss".split()
    ],
    "--loss-scale-window": ["--fp16", "--initial-loss-scale", "1024"],
    "--ckpt-convert": [*SAVE, "--ckpt-convert-save", "converted", "--load", "load"],
    "--lr-wsd-decay-samples": "--lr-decay-style WSD --train-samples 32".split(),
    "--lr-decay-samples": ["--train-samples", "32"],
    "--lr-warmup-samples": ["--train-samples", "32"],
    "--pipeline-model-parallel-layout": "--pipeline-model-parallel-size 2".split(),
    "--squared-relu": ["--no-bias-gelu-fusion"],
    "--glu-linear-offset": ["--quick-geglu", "--disable-bias-linear"],
    "--activation-func-clamp": ["--quick-geglu", "--disable-bias-linear"],
    "--fp16-lm": ["--fp16"],
    "--loss-scale": ["--fp16"],
    "--initial-loss": ["--fp16"],
    "--min-loss": ["--fp16"],
    "--hysteresis": ["--fp16"],
    "--start-weight-decay": "--end-weight-decay 0.1 --weight-decay-incr-style linear".split(),
    "--end-weight-decay": "--start-weight-decay 0.1 --weight-decay-incr-style linear".split(),
    "--save-retain-interval": [*SAVE[:2], "--save-interval", "2"],
    "--load-main-params": [*LOAD, "--no-load-optim"],
    "--non-persistent": SAVE,
    "--replication": ["--replication-jump", "1"],
    "--replication-jump": ["--replication"],
    "--log-memory-interval": ["--log-device-memory-used"],
    "--overlap-param-gather-with": [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"],
    "--num-layers-per-virtual": "--pipeline-model-parallel-size 2 --num-layers 4".split(),
    "--num-virtual-stages": "--pipeline-model-parallel-size 2 --num-layers 4".split(),
    "--reuse-fp32": SHARDED,
    "--logits-save": ["--logits-save-top-k", "4"],
    "--fp8": ["--fp8-format", "hybrid"],
    "--fp4": ["--fp4-format", "e2m1"],
    "--num-query-groups": ["--group-query-attention"],
    "--yarn": ["--position-embedding-type", "yarn"],
    "--rotary": ["--position-embedding-type", "rope"],
    "--use-rope": ["--position-embedding-type", "rope"],
    "--rope-": ["--position-embedding-type", "rope"],
    "--no-rope": ["--position-embedding-type", "rope"],
    "--mrope": ["--position-embedding-type", "mrope"],
    "--recompute-method": "--recompute-granularity full --recompute-num-layers 1".split(),
    "--recompute-num": "--recompute-granularity full --recompute-method uniform".split(),
    "--recompute-modules": "--recompute-granularity selective".split(),
    "--offload-modules": ["--fine-grained-activation-offloading"],
    "--lr-wsd": "--lr-decay-style WSD --lr-wsd-decay-iters 2".split(),
    "--overlap-param-gather": [*SHARDED, "--overlap-grad-reduce"],
    "--ddp-": [*SHARDED, "--overlap-grad-reduce"],
    "--megatron-fsdp": FSDP,
    "--fsdp": FSDP,
    "--use-megatron-fsdp": FSDP[1:],
    "--torch-fsdp2": [
        *"--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist".split(),
        "--no-gradient-accumulation-fusion",
    ],
    "--use-torch-fsdp2": [
        *"--untie-embeddings-and-output-weights --ckpt-format torch_dist".split(),
        "--no-gradient-accumulation-fusion",
    ],
    "--exp-avg": [*SHARDED, "--use-precision-aware-optimizer"],
    "--main-": [*SHARDED, "--use-precision-aware-optimizer"],
    "--use-precision-aware": SHARDED,
    "--optimizer-offload": ["--optimizer-cpu-offload", "--use-precision-aware-optimizer", *SHARDED],
    "--optimizer-cpu-offload": ["--use-precision-aware-optimizer", *SHARDED],
    "--muon": ["--optimizer", "muon"],
    "--ckpt": [*SAVE, *SHARDED],
    "--async": [*SAVE],
    "--save": [*SAVE],
    "--use-persistent": [*SAVE, "--async-save"],
    "--no-ckpt": SAVE,
    "--finetune": LOAD,
    "--profile": ["--profile", "--use-pytorch-profiler"],
    "--sequence-parallel": ["--tensor-model-parallel-size", "2"],
    "--hierarchical": ["--context-parallel-size", "2", "--cp-comm-type", "a2a+p2p"],
    "--cp-comm": ["--context-parallel-size", "2"],
    "--manual-gc-": ["--manual-gc"],
    "--decoupled-min-lr": ["--decoupled-lr", "1e-4"],
    "--dsa": [*LATENT, "--experimental-attention-variant", "dsa"],
    "--linear": ["--experimental-attention-variant", "gated_delta_net"],
}
# A value where the doubled or halved default, the last choice or "given" is none that upstream knows.
VALUE: dict[str, list[str]] = {
    "--hidden-size": ["128"],
    "--num-layers": ["4"],
    "--num-query-groups": ["2"],
    "--train-samples": ["32"],
    "--encoder-seq-length": ["64"],
    "--max-position-embeddings": ["128"],
    "--step-batch-size-schedule": ["0:4 16:8"],
    "--cross-entropy-fusion-impl": ["linear"],
    "--cpu-offloading-num-layers": ["1"],
    "--non-persistent-ckpt-type": ["global"],
    "--ckpt-format": ["torch"],
    "--pipeline-model-parallel-layout": ["Et|tL"],
    "--phase-transition-iterations": ["3"],
    "--exp-avg-dtype": ["bf16"],
    "--exp-avg-sq-dtype": ["bf16"],
    "--mtp-hybrid-override-pattern": ["M"],
    "--data-impl": ["mmap"],
    "--DDP-impl": ["local"],
    "--tokenizer-type": ["NullTokenizer"],
    "--window-size": ["8,0"],
    "--window-attn-skip-freq": ["2"],
    "--moe-layer-freq": ["2"],
    "--no-rope-freq": ["2"],
    "--linear-attention-freq": ["2"],
    "--rampup-batch-size": ["2", "2", "16"],
    "--hierarchical-context-parallel-sizes": ["2", "1"],
    "--recompute-modules": ["core_attn"],
    "--offload-modules": ["core_attn"],
    "--split": ["90,5,5"],
    "--mrope-section": ["2", "3", "3"],
    "--moe-router-topk": ["1"],
    "--moe-aux-loss-coeff": ["0.01"],
    "--moe-router-load-balancing-type": ["seq_aux_loss"],
    "--position-embedding-type": ["rope"],
    "--optimizer": ["sgd"],
    "--cuda-graph-scope": ["attn"],
    "--cuda-graph-modules": ["attn"],
    "--lr-decay-style": ["cosine"],
    "--exit-signal": ["SIGINT"],
    "--log-interval": ["1"],
    "--min-lr": ["1e-4"],
    "--start-weight-decay": ["0.01"],
    "--weight-decay-incr-style": ["constant"],
    "--loss-scale": ["1024"],
    "--hybrid-layer-pattern": ["M*"],
    "--hybrid-override-pattern": ["M*"],
    "--iterations-to-skip": ["3"],
    "--kv-channels": ["32"],
    "--ffn-hidden-size": ["128"],
    "--cp-comm-type": ["a2a"],
    "--experimental-attention-variant": ["gated_delta_net"],
    **{  # a path that exists
        f"--{name}": ["."]
        for name in "data-path train-data-path valid-data-path test-data-path vocab-file merge-file".split()
    },
}
# What of BASE a flag stands in place of.
INSTEAD = {
    "--bf16": [
        *"fp16 loss-scale loss-scale-window initial-loss-scale min-loss-scale hysteresis".split(),
        "fp16-lm-cross-entropy",
    ],
    "--mock-data": "data-path train-data-path valid-data-path test-data-path fim-data".split(),
    "--num-layers 2": ["encoder-num-layers"],
    "--seq-length 64": ["encoder-seq-length"],
    "--global-batch-size 4": ["step-batch-size-schedule"],
    "--train-iters 6": "train-samples lr-decay-samples lr-warmup-samples lr-wsd-decay-samples".split(),
}
OF_TWO = re.compile(
    r"--(tensor|pipeline|context|expert)-model-parallel-size|--context-parallel|--sequence-par"
)


def value_of(action: argparse.Action) -> list[str]:
    """Return what is given behind the flag: another value than the default."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return []
    if flag in VALUE:
        return VALUE[flag]
    if action.choices:
        words = [choice.name if isinstance(choice, enum.Enum) else str(choice) for choice in action.choices]
        return [next(word for word in reversed(words) if word != str(action.default))]
    default = action.default[0] if isinstance(action.default, list) and action.default else action.default
    if action.type is int:
        return [str(2 * default if default and default > 0 else 2)]
    if action.type is float:
        return [str(default / 2 if default else 0.5)]
    return ["2"] if type(action.type).__name__ == "Number" else ["given"]


def beside(flag: str) -> list[str]:
    """Return the flags that it is tried with."""
    return BESIDE[max(filter(flag.startswith, BESIDE), key=len)] if flag.startswith(tuple(BESIDE)) else []


def tried(action: argparse.Action) -> dict[str, str]:
    """Return what the flag was tried with, what came of it, and what was said."""
    flag = action.option_strings[0]
    more, value = beside(flag), value_of(action)
    world = "2" if any(map(OF_TWO.match, [flag, *more])) else "1"
    base = f"{' '.join(BASE)} "
    for words, flags in INSTEAD.items():
        base = base.replace(f"{words} ", "") if flag.removeprefix("--") in flags else base
    command = ["pretrain_gpt.py", *base.split(), *more, flag, *value]
    left_out: list[str] = []

    def note(operation: str, reason: str, *_: str, **__: str) -> None:
        left_out.append(f"{operation}: {reason}")

    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": world, "RANK": "0", "LOCAL_RANK": "0"}),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(unsupported_options.dispatch, "report_fallback", note),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        outcome, line = validated(said)
    ours = next((line for line in left_out if line.startswith(f"{flag.removeprefix('--')}:")), "")
    outcome, line = ("left out", ours) if ours and outcome == "taken" else (outcome, line)
    return {"dest": action.dest, "given": " ".join([*more, flag, *value]), "outcome": outcome, "line": line}


def validated(said: io.StringIO) -> tuple[str, str]:
    """Parse and validate the command line, make its configuration; return the outcome and what was said."""
    try:
        args = arguments.validate_args(arguments.parse_args())
        argument_utils.core_transformer_config_from_args(args)
    except UsageError as error:
        return "refused", " ".join(str(error).split())
    except SystemExit:
        return "value", said.getvalue().strip().splitlines()[-1]
    except Exception as error:  # what a user would see as a traceback
        return "traceback", f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "taken", ""


def main() -> None:
    """Try every Nth flag, by the command line, or each; print what came of them, and the names of all."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: parser  # to make one takes a fifth of a second
    actions = [action for action in parser._actions if action.dest != "help"]
    wanted = {" ".join(action.option_strings) for action in actions[:: int((sys.argv[1:] or ["1"])[0])]}
    rows = {
        " ".join(action.option_strings): {"group": groups[action.dest], **tried(action)}
        for groups in [{a.dest: str(g.title) for g in parser._action_groups for a in g._group_actions}]
        for action in actions
        if " ".join(action.option_strings) in wanted
    }
    names = [" ".join(action.option_strings) for action in actions]
    print(json.dumps({"names": names, "tried": rows}))


if __name__ == "__main__":
    main()
