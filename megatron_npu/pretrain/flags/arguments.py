"""The driver's flags: Megatron's own names, meanings and defaults (megatron-core 0.16), and a few more.

``parse`` only reads them; ``validation.check`` compares them with each other and with the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megatron_npu.base.arg_parser import Parser, integer, number, positive, whole
from megatron_npu.data.tokenization import flags
from megatron_npu.options import hccl_buffers, memory_flags, older_flags
from megatron_npu.options.attention_flags import add_attention_flags
from megatron_npu.options.shared_flags import add_shared
from megatron_npu.options.switches import add_switches
from megatron_npu.pretrain.flags import (
    expert_flags,
    job_flags,
    latent_flags,
    muon_flags,
    rotary_flags,
    run_config,
)
from megatron_npu.web.address import address

Add = Callable[..., Any]

# argparse's own would name all flags twice, 70 lines of them before the first help text
_USAGE = """%(prog)s --num-layers N --hidden-size N --num-attention-heads N --seq-length N
       --max-position-embeddings N --micro-batch-size N
       (--train-iters N | --train-samples N | --epochs N) [FLAG ...]
       %(prog)s --preset NAME --micro-batch-size N (--train-iters N | ...) [FLAG ...]
       %(prog)s --config FILE [FLAG ...]"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``megatron-npu pretrain``."""
    result = Parser(
        "megatron-npu pretrain",
        description="Pre-train a GPT on megatron-core; one process, or several under torchrun.",
        hint="`megatron-npu run` takes a stock script and its flags.",
        usage=_USAGE,
    )
    run_config.add(result.add_argument_group("configuration").add_argument)
    for title, add_flags in _GROUPS:
        add_flags(result.add_argument_group(title).add_argument)
    add_attention_flags(result)
    add_switches(result)
    older_flags.add(result)
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags' values.

    Raises:
        UsageError: an unknown flag, a missing required one, or a value of the wrong kind.
    """
    flags_parser = parser()
    argv = run_config.expanded(argv, flags_parser)
    args = flags_parser.parse_args(argv)
    older_flags.apply(args, argv)
    return args


def _model(add: Add) -> None:
    add("--num-layers", type=positive, required=True, help="transformer layers")
    add("--hidden-size", type=positive, required=True, help="size of the residual stream [s, b, h]")
    add("--num-attention-heads", type=positive, required=True, help="query heads of a layer")
    add(
        "--ffn-hidden-size",
        type=positive,
        help="inner size of a feed-forward layer (default: 4 x hidden, with --swiglu 8/3 x hidden)",
    )
    add("--kv-channels", type=positive, help="size of a head (default: hidden / heads)")
    add("--group-query-attention", action="store_true", help="share keys and values between heads")
    add(
        "--num-query-groups",
        type=positive,
        default=1,
        help="key and value heads with --group-query-attention; without it, one for each query head",
    )
    add("--seq-length", type=positive, required=True, help="tokens of a training sequence")
    add("--max-position-embeddings", type=positive, required=True, help="tokens of the longest sequence")
    add(
        "--position-embedding-type",
        choices=["learned_absolute", "rope", "yarn", "none"],
        default="learned_absolute",
        help="how positions enter; yarn: rope, stretched by --rotary-scaling-factor (arXiv:2309.00071)",
    )
    add("--use-rotary-position-embeddings", action="store_true", help="= --position-embedding-type rope")
    rotary_flags.add(add)
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="of every norm")
    add(
        "--norm-epsilon",
        type=number,
        default=1e-5,
        dest="layernorm_epsilon",
        help="added to the variance (RMSNorm: the mean square)",
    )
    add(
        "--apply-layernorm-1p",
        action="store_true",
        dest="layernorm_zero_centered_gamma",
        help="keep a norm's scale as its difference to 1",
    )
    add("--swiglu", action="store_true", help="gated SiLU instead of GELU")
    add(
        "--disable-bias-linear",
        action="store_false",
        dest="add_bias_linear",
        help="linear layers without bias",
    )
    add("--add-qkv-bias", action="store_true", help="a bias for query, key and value even so")
    add(
        "--add-attention-bias",
        action="store_true",
        help="the same, and one for the layer behind the attention, as a Llama's attention_bias",
    )
    add("--qk-layernorm", action="store_true", help="norm the queries and keys of each head")
    add(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="an output layer of its own instead of the embedding's weight",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=positive,
        default=128,
        help="pad the vocabulary to a multiple of N x the tensor-parallel size",
    )
    add("--init-method-std", type=number, default=0.02, help="standard deviation of the initial weights")
    add(
        "--use-cpu-initialization",
        action=argparse.BooleanOptionalAction,
        help="draw the initial weights on the host, the same for every tensor-parallel size "
        "(default: on the cpu device, without expert parallelism)",
    )


def _attention(add: Add) -> None:
    add(
        "--window-attn-skip-freq",
        type=expert_flags.layer_frequency,
        metavar="N|PATTERN",
        help="no window of --pre-tockens in every Nth layer; or 1 for a layer with it and 0 for one without: "
        "[0]*2+[1]*2 (default: all have it)",
    )
    add("--attention-dropout", type=number, default=0.1, help="probability, on attention's probabilities")
    add("--hidden-dropout", type=number, default=0.1, help="probability, before each residual sum")
    add(
        "--attention-softmax-in-fp32",
        action="store_true",
        help="for the unfused path; the fused one always computes it in fp32",
    )
    add(
        "--apply-query-key-layer-scaling",
        action="store_true",
        help="divide the scores by the layer's number before they are rounded, for fp16",
    )
    add_shared(add, "--use-flash-attn")
    add(
        "--attention-backend",
        choices=["auto", "flash", "fused", "unfused", "local"],
        default="auto",
        help="auto, flash and fused: the device's fused attention; unfused and local: Megatron's own",
    )
    add(
        "--softmax-type",
        choices=["vanilla", "off-by-one", "learnable"],
        default="vanilla",
        help="off-by-one: attention's probabilities may sum to less than 1, as if a key of score 0 took the "
        "rest; learnable: of a score that each head learns; megatron-core 0.15 or later",
    )


def _parallel(add: Add) -> None:
    add("--tensor-model-parallel-size", type=positive, default=1, help="ranks that share each layer")
    add("--pipeline-model-parallel-size", type=positive, default=1, help="ranks that share the layers")
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=positive,
        help="layers of each of the pieces that a rank interleaves (default: one piece)",
    )
    add(
        "--num-virtual-stages-per-pipeline-rank",
        type=positive,
        help="the same as a number of pieces of each rank (default: 1)",
    )
    add("--context-parallel-size", type=positive, default=1, help="ranks that share each sequence")
    add(
        "--cp-comm-type",
        choices=["p2p", "all_gather", "a2a", "a2a+p2p"],
        default="p2p",
        help="how context-parallel ranks share keys: in a ring, gathered, exchanged for heads, or exchanged "
        "among near ones and in a ring of far ones",
    )
    add(
        "--hierarchical-context-parallel-sizes",
        type=positive,
        nargs="+",
        help="of a2a+p2p: near ranks, and far ones; their product is --context-parallel-size",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="tensor-parallel ranks share the sequence between their layers, too",
    )
    add(
        "--tp-comm-overlap",
        action="store_true",
        help="a product and its communication in one operation; needs --sequence-parallel; NPU only",
    )
    memory_flags.add_swap_optimizer(add)
    hccl_buffers.add(add)
    add("--use-distributed-optimizer", action="store_true", help="shard the optimizer over data parallelism")
    add(
        "--overlap-grad-reduce",
        action="store_true",
        help="reduce gradients while the backward pass computes others",
    )
    add(
        "--overlap-param-gather",
        action="store_true",
        help="gather parameters while the forward pass computes; needs --use-distributed-optimizer",
    )
    add(
        "--no-overlap-p2p-communication",
        action="store_false",
        dest="overlap_p2p_comm",
        help="let pipeline stages wait for each other's tensors",
    )
    add_shared(add, "--distributed-timeout-minutes")


def _training(add: Add) -> None:
    add("--micro-batch-size", type=positive, required=True, help="sequences of one forward pass on one rank")
    add(
        "--global-batch-size",
        type=positive,
        help="sequences of one iteration on all ranks (default: micro batch x data-parallel size)",
    )
    job_flags.add_ramp(add)
    job_flags.add_step_graph(add)
    add(
        "--train-iters",
        type=whole,
        help="iterations in all; 0 with --save: save and end; this, --train-samples or --epochs is required",
    )
    add(
        "--train-samples",
        type=positive,
        help="sequences in all; an incomplete last global batch is left out; the schedule counts samples too",
    )
    add(
        "--epochs",
        type=positive,
        help="passes through the training data in all, each in an order of its own; an incomplete last "
        "global batch is left out",
    )
    job_flags.add_ends(add)
    add_shared(add, "--seed", type=integer)
    add(
        "--deterministic-mode",
        action="store_true",
        help="operations that give the same bits each time, slower ones if need be; one without such a form "
        "ends the run",
    )
    add("--calculate-per-token-loss", action="store_true", help="weigh each token of a batch equally")


def _recomputation(add: Add) -> None:
    add("--recompute-activations", action="store_true", help="= --recompute-granularity selective")
    add(
        "--recompute-granularity",
        choices=["full", "selective"],
        help="what the backward pass computes again instead of keeping it: whole layers, or "
        "--recompute-modules of each (default: nothing)",
    )
    add(
        "--recompute-method",
        choices=["uniform", "block"],
        help="of full: all layers in groups of --recompute-num-layers, or the first so many of a stage",
    )
    add("--recompute-num-layers", type=positive, help="of --recompute-method")
    add(
        "--recompute-modules",
        nargs="*",
        metavar="MODULE",
        help="of selective: core_attn, mlp, layernorm and others of megatron-core (default: core_attn)",
    )
    memory_flags.add_activation_offloading(add)


def _faults(add: Add) -> None:
    add(
        "--no-check-for-nan-in-loss-and-grad",
        action="store_false",
        dest="check_for_nan_in_loss_and_grad",
        help="go on with a loss or gradient that is not a number",
    )
    add(
        "--loss-spike-policy",
        choices=["note", "skip", "rewind"],
        default="note",
        help="of a loss that leaps or is not a number: say so (and end the run where it is none); skip: "
        "leave its update out; rewind: go back to the newest whole checkpoint in --save, and leave the data "
        "since out",
    )
    add(
        "--rerun-mode",
        choices=["disabled", "validate_results"],
        default="disabled",
        help="validate_results: compute such an iteration again before anything is done about it, to tell a "
        "device that computes wrongly from bad data",
    )
    add(
        "--iterations-to-skip",
        type=whole,
        nargs="*",
        default=[],
        metavar="N",
        help="iterations whose data are passed over without training, counted from 0 as upstream does: the "
        "one that the log calls N + 1",
    )
    add_shared(add, "--check-weight-hash-across-dp-replicas-interval")


def _fusions(add: Add) -> None:
    for dest, what in (
        ("masked_softmax_fusion", "scale, mask and softmax of the unfused attention"),
        ("bias_gelu_fusion", "bias and GELU"),
        ("bias_swiglu_fusion", "bias and gated SiLU"),
        ("bias_dropout_fusion", "bias, dropout and residual sum"),
        ("gradient_accumulation_fusion", "a weight's gradient and its sum over micro-batches"),
    ):
        flag = f"--no-{dest.replace('_', '-')}"
        add(flag, action="store_false", dest=dest, help=f"leave {what} to separate operations")
    add("--cross-entropy-loss-fusion", action="store_true", help="the loss by one operation")
    add(
        "--cross-entropy-fusion-impl",
        choices=["native", "linear"],
        default="native",
        help="of --cross-entropy-loss-fusion; linear: together with the output layer, in blocks of the "
        "vocabulary, so that logits are never whole in memory",
    )


_KEPT = {
    "main_grads": "gradients",
    "main_params": "the main copy of 16-bit weights",
    "exp_avg": "the mean of gradients",
    "exp_avg_sq": "the mean of their squares",
}


def _optimizer(add: Add) -> None:
    add(
        "--optimizer",
        choices=["adam", "muon"],
        default="adam",
        help="muon: matrices of the layers by Muon, all else by Adam; megatron-core 0.16 or later",
    )
    add_shared(add, "--lr", help="highest learning rate; required to train")
    add_shared(add, "--min-lr")
    add(
        "--lr-decay-style",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        default="linear",
        help="shape of the decay after the warm-up; WSD: warm up, stay, decay",
    )
    add_shared(add, "--lr-decay-iters")
    add(
        "--lr-decay-samples",
        type=positive,
        help="the same in samples, with --train-samples (default: --train-samples)",
    )
    add(
        "--lr-wsd-decay-style",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
        default="exponential",
        help="shape of the last part of WSD",
    )
    add("--lr-wsd-decay-iters", type=positive, help="iterations of the last part of WSD")
    add("--lr-wsd-decay-samples", type=positive, help="the same in samples, with --train-samples")
    add_shared(add, "--lr-warmup-iters", help="iterations from --lr-warmup-init up to --lr")
    add("--lr-warmup-samples", type=whole, default=0, help="the same in samples, with --train-samples")
    add("--lr-warmup-fraction", type=number, help="the same as a part of the decay iterations, from 0 to 1")
    add("--lr-warmup-init", type=number, default=0.0, help="learning rate that the warm-up begins with")
    add_shared(add, "--weight-decay")
    add("--start-weight-decay", type=number, help="of a weight decay that changes (default: --weight-decay)")
    add("--end-weight-decay", type=number, help="of a weight decay that changes (default: --weight-decay)")
    add(
        "--weight-decay-incr-style",
        choices=["constant", "linear", "cosine"],
        default="constant",
        help="how it goes from its start to its end",
    )
    add_shared(add, "--clip-grad", "--adam-beta1", "--adam-beta2", "--adam-eps")
    add(
        "--use-precision-aware-optimizer",
        action="store_true",
        help="let the next four say what Adam keeps; needs --use-distributed-optimizer",
    )
    for what, types in memory_flags.NARROW.items():
        flag = f"--{what.replace('_', '-')}-dtype"
        add(flag, choices=types, default="fp32", help=f"type of {_KEPT[what]}")
    memory_flags.add_reuse_of_weights(add)
    add("--override-opt_param-scheduler", action="store_true", help="the flags' schedule, on resume too")
    add("--use-checkpoint-opt_param-scheduler", action="store_true", help="the checkpoint's schedule")


def _precision(add: Add) -> None:
    add("--bf16", action="store_true", help="compute in bfloat16; the optimizer keeps fp32")
    add("--fp16", action="store_true", help="compute in float16; the optimizer keeps fp32")
    add(
        "--accumulate-allreduce-grads-in-fp32",
        action="store_true",
        help="sum and reduce gradients in fp32; always so with --bf16",
    )
    add("--loss-scale", type=number, help="fixed scale of the loss (default: with --fp16 a dynamic one)")
    add("--initial-loss-scale", type=number, default=2.0**32, help="that the dynamic one begins with")
    add("--min-loss-scale", type=number, default=1.0, help="below which the dynamic one does not fall")
    add("--loss-scale-window", type=positive, default=1000, help="iterations before it is doubled")
    add("--hysteresis", type=positive, default=2, help="overflows before it is halved")


def _data(add: Add) -> None:
    add(
        "--data-path",
        nargs="*",
        metavar="PREFIX",
        help="PREFIX.bin and PREFIX.idx; several; or weights and prefixes in turns",
    )
    add("--mock-data", action="store_true", help="made-up tokens instead of --data-path")
    add(
        "--split",
        metavar="A,B,C",
        help="parts of the documents of --data-path for training, validation and test (default: 969, 30, 1)",
    )
    for part, use in (
        ("train", "training, instead of --data-path and --split"),
        ("valid", "validation"),
        ("test", "one evaluation at the end"),
    ):
        add(
            f"--{part}-data-path",
            nargs="*",
            metavar="PREFIX",
            help=f"as --data-path: all of its documents are for {use}",
        )
    flags.add_tokenizer(
        add,
        ["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"],
        "NullTokenizer: data that is numbers already",
    )
    add(
        "--vocab-size",
        type=positive,
        help="of the NullTokenizer, without its end of document; of a model that has more than its tokenizer",
    )
    flags.add_null_end(add)
    add_shared(add, "--data-cache-path")
    add("--num-workers", type=whole, help="processes that read data (default: 0 on the cpu device, else 2)")
    add_shared(add, "--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask")


def _checkpoints(add: Add) -> None:
    add_shared(add, "--save", help="where checkpoints and the summary of the run are written")
    add_shared(add, "--load")
    add(
        "--ckpt-step",
        type=whole,
        metavar="N",
        help="load the checkpoint of iteration N (default: the newest)",
    )
    add_shared(add, "--load-last-good")
    add(
        "--no-verify-checkpoint",
        action="store_false",
        dest="verify_checkpoint",
        help="do not compare a checkpoint's files with their checksums before it is loaded",
    )
    add_shared(add, "--save-interval")
    add(
        "--async-save",
        action="store_true",
        help="go on training while processes of their own write a checkpoint",
    )
    job_flags.add_retention(add)
    add("--finetune", action="store_true", help="load the weights alone and begin at iteration 0")
    add("--no-load-optim", action="store_true", help="begin with a fresh optimizer")
    add("--no-load-rng", action="store_true", help="begin with random numbers of --seed")
    add("--no-save-optim", action="store_true", help="leave the optimizer out of checkpoints")
    add("--no-save-rng", action="store_true", help="leave the random generators out of checkpoints")
    add("--ckpt-format", choices=["torch_dist"], default="torch_dist", help="the only one")
    add(
        "--dist-ckpt-optim-fully-reshardable",
        action="store_true",
        help="save the distributed optimizer so that tensor and pipeline sizes can change too",
    )


def _logging(add: Add) -> None:
    add_shared(add, "--log-interval", default=100)
    add("--log-throughput", action="store_true", help="accepted: throughput is always logged")
    add("--eval-interval", type=positive, help="iterations between two validations (default: one at the end)")
    add("--eval-iters", type=whole, default=100, help="global batches of a validation; 0: none at all")
    job_flags.add_validation(add)
    add(
        "--eval-train-loss",
        action="store_true",
        help="evaluate the first --eval-iters global batches of the training data at each validation, too",
    )
    add(
        "--log-loss-per-rank",
        action="store_true",
        help="a line for each data-parallel rank's own loss behind each iteration's line",
    )
    add_shared(add, "--tensorboard-dir")
    job_flags.add_wandb(add)
    add_shared(add, "--json-log")
    add(
        "--sample-prompt",
        nargs="+",
        metavar="TEXT",
        help="draw a text from each prompt at each validation; an empty one: from nothing (default: none)",
    )
    add("--sample-tokens", type=positive, default=50, help="tokens to add at most to a --sample-prompt")
    add(
        "--sample-temperature",
        type=number,
        default=0.0,
        help="logits are divided by it; 0: the likeliest token",
    )
    add(
        "--dashboard",
        type=address,
        metavar="[HOST:]PORT",
        help="serve a page that follows the run; 0: a free port (default: no page; HOST: 127.0.0.1)",
    )
    add_shared(
        add,
        "--plot",
        help="a PNG of loss and learning rate, drawn again at each validation and at the end (default: with "
        "--save, if matplotlib is installed)",
    )


_GROUPS: tuple[tuple[str, Callable[[Add], None]], ...] = (
    ("model", _model),
    ("attention", _attention),
    ("multi-latent attention", latent_flags.add),
    ("multi-token prediction", latent_flags.add_prediction),
    ("experts", expert_flags.add),
    ("parallelism", _parallel),
    ("training", _training),
    ("recomputation", _recomputation),
    ("faults", _faults),
    ("fusions", _fusions),
    ("optimizer", _optimizer),
    ("Muon", muon_flags.add),
    ("precision", _precision),
    ("data", _data),
    ("checkpoints", _checkpoints),
    ("logging", _logging),
)
