"""The driver's flags: Megatron's own names, meanings and defaults (megatron-core 0.16), and a few more.

``parse`` only reads them; ``validation.check`` compares them with each other and with the machine.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_npu import settings
from megatron_npu.errors import UsageError

Add = Callable[..., Any]


class Parser(argparse.ArgumentParser):
    """Turns argparse's own complaints into ``UsageError``; an unknown flag gets the nearest known ones."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "the flags and values of --help", f"See `{self.prog} --help`.")

    def parse_args(  # type: ignore[override]  # argparse declares one overload for each kind of namespace
        self, args: Any = None, namespace: Any = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        flags = [word for word in unknown if word.startswith("--")]
        if flags:
            known = difflib.get_close_matches(flags[0].partition("=")[0], self._option_string_actions, n=3)
            raise UsageError(
                f"no flag {' '.join(flags)}",
                " or ".join(known) if known else "a flag of --help",
                f"See `{self.prog} --help`; `megatron-npu run` takes a stock script and its flags.",
            )
        if unknown:
            self.error(f"unexpected {' '.join(unknown)}")
        return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``megatron-npu pretrain``."""
    result = Parser(
        "megatron-npu pretrain",
        description="Pre-train a GPT on megatron-core; one process, or several under torchrun.",
        allow_abbrev=False,
    )
    for title, add_flags in _GROUPS:
        add_flags(result.add_argument_group(title).add_argument)
    settings.add_attention_flags(result)
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags' values.

    Raises:
        UsageError: an unknown flag, a missing required one, or a value of the wrong kind.
    """
    return parser().parse_args(list(argv))


def _model(add: Add) -> None:
    add("--num-layers", type=_positive, required=True, help="transformer layers")
    add("--hidden-size", type=_positive, required=True, help="size of the residual stream")
    add("--num-attention-heads", type=_positive, required=True, help="query heads")
    add("--ffn-hidden-size", type=_positive, help="default: 4 x hidden, with --swiglu 8/3 x hidden")
    add("--kv-channels", type=_positive, help="size of a head (default: hidden / heads)")
    add("--group-query-attention", action="store_true", help="share keys and values between heads")
    add("--num-query-groups", type=_positive, default=1, help="key and value heads of grouped queries")
    add("--seq-length", type=_positive, required=True, help="tokens of a training sequence")
    add("--max-position-embeddings", type=_positive, required=True, help="longest sequence of the model")
    add(
        "--position-embedding-type",
        choices=["learned_absolute", "rope", "none"],
        default="learned_absolute",
        help="how positions enter",
    )
    add("--use-rotary-position-embeddings", action="store_true", help="= --position-embedding-type rope")
    add("--rotary-percent", type=float, default=1.0, help="part of a head that is rotated")
    add("--rotary-base", type=int, default=10000, help="base of the rotary frequencies")
    add("--rotary-interleaved", action="store_true", help="rotate neighbours instead of halves")
    add("--use-rope-scaling", action="store_true", help="lower the low rotary frequencies, as Llama 3.1 does")
    add("--rope-scaling-factor", type=float, default=8.0, help="of --use-rope-scaling")
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5, dest="layernorm_epsilon")
    add("--apply-layernorm-1p", action="store_true", dest="layernorm_zero_centered_gamma")
    add("--swiglu", action="store_true", help="gated SiLU instead of GELU")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--add-qkv-bias", action="store_true")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--make-vocab-size-divisible-by", type=_positive, default=128, help="times the tensor-parallel size")
    add("--init-method-std", type=float, default=0.02, help="of the initial weights")
    add(
        "--use-cpu-initialization",
        action=argparse.BooleanOptionalAction,
        help="draw the initial weights on the host, the same for every tensor-parallel size "
        "(default: on the cpu device)",
    )


def _attention(add: Add) -> None:
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--attention-softmax-in-fp32", action="store_true", help="for the unfused path; the fused is fp32")
    add("--apply-query-key-layer-scaling", action="store_true")
    add("--use-flash-attn", action="store_true", help="= --attention-backend flash")
    add("--attention-backend", choices=["auto", "flash", "fused", "unfused", "local"], default="auto")


def _parallel(add: Add) -> None:
    add("--tensor-model-parallel-size", type=_positive, default=1)
    add("--pipeline-model-parallel-size", type=_positive, default=1)
    add("--num-layers-per-virtual-pipeline-stage", type=_positive)
    add("--num-virtual-stages-per-pipeline-rank", type=_positive)
    add("--context-parallel-size", type=_positive, default=1)
    add(
        "--cp-comm-type",
        choices=["p2p", "all_gather", "a2a"],
        default="p2p",
        help="how context-parallel ranks share keys: in a ring, gathered, or exchanged for heads",
    )
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true", help="shard the optimizer over data parallelism")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    add("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    add("--distributed-timeout-minutes", type=_positive, default=10)


def _training(add: Add) -> None:
    add("--micro-batch-size", type=_positive, required=True, help="sequences of one forward pass")
    add("--global-batch-size", type=_positive, help="default: micro batch x data-parallel size")
    add("--train-iters", type=_whole, required=True, help="iterations in all; 0 with --save: save and end")
    add("--exit-interval", type=_positive, help="save and end at the iterations that it divides")
    add("--exit-signal-handler", action="store_true", help="save and end after SIGTERM")
    add("--seed", type=int, default=1234)
    add("--recompute-activations", action="store_true", help="= --recompute-granularity selective")
    add("--recompute-granularity", choices=["full", "selective"])
    add("--recompute-method", choices=["uniform", "block"])
    add("--recompute-num-layers", type=_positive)
    add("--recompute-modules", nargs="*")
    add("--calculate-per-token-loss", action="store_true", help="weigh each token of a batch equally")
    add("--no-check-for-nan-in-loss-and-grad", action="store_false", dest="check_for_nan_in_loss_and_grad")
    add("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion")
    add("--no-bias-gelu-fusion", action="store_false", dest="bias_gelu_fusion")
    add("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion")
    add("--no-bias-dropout-fusion", action="store_false", dest="bias_dropout_fusion")
    add("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")
    add("--cross-entropy-loss-fusion", action="store_true")


def _optimizer(add: Add) -> None:
    add("--lr", type=float, help="highest learning rate; required to train")
    add("--min-lr", type=float, default=0.0)
    add(
        "--lr-decay-style",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        default="linear",
    )
    add("--lr-decay-iters", type=_positive, help="default: --train-iters")
    add(
        "--lr-wsd-decay-style",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
        default="exponential",
    )
    add("--lr-wsd-decay-iters", type=_positive)
    add("--lr-warmup-iters", type=_whole, default=0)
    add("--lr-warmup-fraction", type=float, help="of the decay iterations")
    add("--lr-warmup-init", type=float, default=0.0)
    add("--weight-decay", type=float, default=0.01)
    add("--start-weight-decay", type=float)
    add("--end-weight-decay", type=float)
    add("--weight-decay-incr-style", choices=["constant", "linear", "cosine"], default="constant")
    add("--clip-grad", type=float, default=1.0, help="largest norm of the gradient; 0: no limit")
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--override-opt_param-scheduler", action="store_true", help="the flags' schedule, on resume too")
    add("--use-checkpoint-opt_param-scheduler", action="store_true", help="the checkpoint's schedule")


def _precision(add: Add) -> None:
    add("--bf16", action="store_true")
    add("--fp16", action="store_true")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true", help="always so with --bf16")
    add("--loss-scale", type=float, help="fixed scale of the loss; default with --fp16: a dynamic one")
    add("--initial-loss-scale", type=float, default=2.0**32)
    add("--min-loss-scale", type=float, default=1.0)
    add("--loss-scale-window", type=_positive, default=1000, help="iterations before it is raised")
    add("--hysteresis", type=_positive, default=2, help="overflows before it is lowered")


def _data(add: Add) -> None:
    add("--data-path", nargs="*", help="a prefix, several, or weights and prefixes in turns")
    add("--mock-data", action="store_true", help="made-up tokens instead of --data-path")
    add("--split", default="969, 30, 1", help="parts for training, validation and test")
    add(
        "--tokenizer-type",
        choices=["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"],
        default="GPT2BPETokenizer",
    )
    add("--vocab-file", help="GPT-2's vocab.json")
    add("--merge-file", help="GPT-2's merges.txt")
    add("--tokenizer-model", metavar="DIR", help="with the tokenizer.json of a HuggingFaceTokenizer")
    add(
        "--vocab-size",
        type=_positive,
        help="of the NullTokenizer, without its end of document; of a model that has more than its tokenizer",
    )
    add("--data-cache-path", help="where the dataset's indices are kept (default: beside the data)")
    add("--num-workers", type=_whole, help="processes that read data (default: 0 on the cpu device, else 2)")
    add("--eod-mask-loss", action="store_true")
    add("--reset-position-ids", action="store_true")
    add("--reset-attention-mask", action="store_true")


def _checkpoints(add: Add) -> None:
    add("--save", metavar="DIR")
    add("--load", metavar="DIR")
    add("--save-interval", type=_positive, help="default: only at the end")
    add("--finetune", action="store_true", help="load the weights alone and begin at iteration 0")
    add("--no-load-optim", action="store_true")
    add("--no-load-rng", action="store_true")
    add("--no-save-optim", action="store_true")
    add("--no-save-rng", action="store_true")
    add("--ckpt-format", choices=["torch_dist"], default="torch_dist")
    add(
        "--dist-ckpt-optim-fully-reshardable",
        action="store_true",
        help="save the distributed optimizer so that tensor and pipeline sizes can change too",
    )


def _logging(add: Add) -> None:
    add("--log-interval", type=_positive, default=100)
    add("--log-throughput", action="store_true", help="accepted: throughput is always logged")
    add("--eval-interval", type=_positive, help="default: evaluate at the end alone")
    add("--eval-iters", type=_whole, default=100)
    add("--tensorboard-dir", metavar="DIR")
    add(
        "--json-log",
        metavar="FILE",
        help="one JSON object a log event, appended (default: metrics.jsonl in --save or --tensorboard-dir)",
    )
    add("--plot", action=argparse.BooleanOptionalAction, help="a PNG of loss and learning rate at the end")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


_GROUPS: tuple[tuple[str, Callable[[Add], None]], ...] = (
    ("model", _model),
    ("attention", _attention),
    ("parallelism", _parallel),
    ("training", _training),
    ("optimizer", _optimizer),
    ("precision", _precision),
    ("data", _data),
    ("checkpoints", _checkpoints),
    ("logging", _logging),
)
