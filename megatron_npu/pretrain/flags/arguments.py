"""Declare the flags of ``megatron-npu pretrain``, with the names, meanings and defaults of megatron-core
0.16.

Some flags are additions of this project. ``parse`` only parses flags; ``validation.check`` checks them
against each other and against the machine.
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
        description="Pre-train a GPT with megatron-core, in one process or in several under torchrun.",
        hint="To run a stock script with its own flags, use `megatron-npu run`.",
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
    """Parse the command line, and return the values of the flags.

    Raises:
        UsageError: a flag is unknown, a required flag is missing, or a value has the wrong type.
    """
    flags_parser = parser()
    argv = run_config.expanded(argv, flags_parser)
    args = flags_parser.parse_args(argv)
    older_flags.apply(args, argv)
    return args


def _model(add: Add) -> None:
    add("--num-layers", type=positive, required=True, help="number of transformer layers")
    add(
        "--hidden-size",
        type=positive,
        required=True,
        help="hidden size, the size of the residual stream [s, b, h]",
    )
    add("--num-attention-heads", type=positive, required=True, help="number of query heads per layer")
    add(
        "--ffn-hidden-size",
        type=positive,
        help="inner size of a feed-forward layer (default: 4 x hidden size; with --swiglu: 8/3 x)",
    )
    add("--kv-channels", type=positive, help="size of an attention head (default: hidden size / heads)")
    add(
        "--group-query-attention", action="store_true", help="share keys and values between query heads (GQA)"
    )
    add(
        "--num-query-groups",
        type=positive,
        default=1,
        help="number of key and value heads with --group-query-attention; without it, one per query head",
    )
    add("--seq-length", type=positive, required=True, help="number of tokens in a training sequence")
    add("--max-position-embeddings", type=positive, required=True, help="maximum number of positions")
    add(
        "--position-embedding-type",
        choices=["learned_absolute", "rope", "yarn", "none"],
        default="learned_absolute",
        help="position encoding; yarn: rope extended by --rotary-scaling-factor (arXiv:2309.00071)",
    )
    add(
        "--use-rotary-position-embeddings",
        action="store_true",
        help="use rotary position embeddings, like --position-embedding-type rope",
    )
    rotary_flags.add(add)
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="type of every norm")
    add(
        "--norm-epsilon",
        type=number,
        default=1e-5,
        dest="layernorm_epsilon",
        help="epsilon added to the variance in LayerNorm and to the mean square in RMSNorm",
    )
    add(
        "--apply-layernorm-1p",
        action="store_true",
        dest="layernorm_zero_centered_gamma",
        help="store each norm's scale as its difference from 1",
    )
    add("--swiglu", action="store_true", help="use gated SiLU instead of GELU")
    add(
        "--disable-bias-linear",
        action="store_false",
        dest="add_bias_linear",
        help="use linear layers without bias",
    )
    add(
        "--add-qkv-bias",
        action="store_true",
        help="add a bias to the QKV projection even with --disable-bias-linear",
    )
    add(
        "--add-attention-bias",
        action="store_true",
        help="add a bias to the QKV projection and to the attention's output projection, like "
        "attention_bias in a Llama configuration",
    )
    add("--qk-layernorm", action="store_true", help="normalize the queries and keys of each head")
    add(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="use a separate output layer instead of the embedding's weight",
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
        help="initialize the weights on the host, so that they do not depend on the tensor-parallel size "
        "(default: only on the cpu device without expert parallelism)",
    )


def _attention(add: Add) -> None:
    add(
        "--window-attn-skip-freq",
        type=expert_flags.layer_frequency,
        metavar="N|PATTERN",
        help="use full attention, without the window of --pre-tockens, in every Nth layer; or a list with 1 "
        "for each layer with the window and 0 for each layer without, such as [0]*2+[1]*2 (default: "
        "all layers have the window)",
    )
    add(
        "--attention-dropout",
        type=number,
        default=0.1,
        help="dropout probability applied to the attention probabilities",
    )
    add(
        "--hidden-dropout",
        type=number,
        default=0.1,
        help="dropout probability applied before each residual addition",
    )
    add(
        "--attention-softmax-in-fp32",
        action="store_true",
        help="compute the softmax of the unfused attention in fp32; the fused attention always does so",
    )
    add(
        "--apply-query-key-layer-scaling",
        action="store_true",
        help="divide the attention scores by the layer number before rounding, to avoid overflow in fp16",
    )
    add_shared(add, "--use-flash-attn")
    add(
        "--attention-backend",
        choices=["auto", "flash", "fused", "unfused", "local"],
        default="auto",
        help="attention implementation; auto, flash, fused: the device's fused attention; unfused, local: "
        "Megatron's own",
    )
    add(
        "--softmax-type",
        choices=["vanilla", "off-by-one", "learnable"],
        default="vanilla",
        help="softmax variant; off-by-one: attention probabilities may sum to less than 1, as if there were "
        "another key with score 0; learnable: each head learns that score; needs megatron-core 0.15 or "
        "later",
    )


def _parallel(add: Add) -> None:
    add("--tensor-model-parallel-size", type=positive, default=1, help="tensor-parallel size")
    add("--pipeline-model-parallel-size", type=positive, default=1, help="number of pipeline stages")
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=positive,
        help="number of layers in each model chunk of the interleaved pipeline schedule "
        "(default: one chunk per rank)",
    )
    add(
        "--num-virtual-stages-per-pipeline-rank",
        type=positive,
        help="number of model chunks per rank in the interleaved pipeline schedule (default: 1)",
    )
    add(
        "--context-parallel-size",
        type=positive,
        default=1,
        help="context-parallel size: number of ranks that split each sequence",
    )
    add(
        "--cp-comm-type",
        choices=["p2p", "all_gather", "a2a", "a2a+p2p"],
        default="p2p",
        help="how context-parallel ranks exchange keys and values; p2p: in a ring; all_gather: gather "
        "them; a2a: all-to-all over the heads; a2a+p2p: a2a among nearby ranks, a ring among distant ones",
    )
    add(
        "--hierarchical-context-parallel-sizes",
        type=positive,
        nargs="+",
        help="number of nearby ranks and number of distant ranks for a2a+p2p; their product must be "
        "--context-parallel-size",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="also partition the activations between tensor-parallel layers, along the sequence dimension",
    )
    add(
        "--tp-comm-overlap",
        action="store_true",
        help="fuse each matmul with its communication; needs --sequence-parallel; NPU only",
    )
    memory_flags.add_swap_optimizer(add)
    hccl_buffers.add(add)
    add(
        "--use-distributed-optimizer",
        action="store_true",
        help="shard the optimizer states over the data-parallel ranks",
    )
    add(
        "--overlap-grad-reduce",
        action="store_true",
        help="overlap gradient reduction with the rest of the backward pass",
    )
    add(
        "--overlap-param-gather",
        action="store_true",
        help="gather parameters during the forward pass; needs --use-distributed-optimizer",
    )
    add(
        "--no-overlap-p2p-communication",
        action="store_false",
        dest="overlap_p2p_comm",
        help="do not overlap pipeline communication with computation",
    )
    add_shared(add, "--distributed-timeout-minutes")


def _training(add: Add) -> None:
    add(
        "--micro-batch-size",
        type=positive,
        required=True,
        help="number of sequences per rank and forward pass",
    )
    add(
        "--global-batch-size",
        type=positive,
        help="number of sequences per iteration over all ranks (default: micro batch x data-parallel size)",
    )
    job_flags.add_ramp(add)
    job_flags.add_step_graph(add)
    add(
        "--train-iters",
        type=whole,
        help="total number of iterations; with --save, 0 saves the initial model and exits; exactly one "
        "of this flag, --train-samples and --epochs is required",
    )
    add(
        "--train-samples",
        type=positive,
        help="total number of sequences; an incomplete last global batch is dropped, and the "
        "learning-rate schedule is also counted in samples",
    )
    add(
        "--epochs",
        type=positive,
        help="total number of passes over the training data; each pass has its own sample order, and an "
        "incomplete last global batch is dropped",
    )
    job_flags.add_ends(add)
    add_shared(add, "--seed", type=integer)
    add(
        "--deterministic-mode",
        action="store_true",
        help="use deterministic operations, even if they are slower; raise an error if an operation has no "
        "deterministic version",
    )
    add(
        "--calculate-per-token-loss",
        action="store_true",
        help="give each token of a global batch the same weight in the loss",
    )


def _recomputation(add: Add) -> None:
    add(
        "--recompute-activations",
        action="store_true",
        help="use selective recomputation, like --recompute-granularity selective",
    )
    add(
        "--recompute-granularity",
        choices=["full", "selective"],
        help="what to recompute in the backward pass; full: whole layers; selective: the "
        "--recompute-modules of each layer (default: nothing)",
    )
    add(
        "--recompute-method",
        choices=["uniform", "block"],
        help="how full recomputation selects layers; uniform: all layers, in groups of "
        "--recompute-num-layers; block: the first --recompute-num-layers of each stage",
    )
    add(
        "--recompute-num-layers",
        type=positive,
        help="layers per group (uniform) or recomputed layers per stage (block); see --recompute-method",
    )
    add(
        "--recompute-modules",
        nargs="*",
        metavar="MODULE",
        help="modules that selective recomputation covers: core_attn, mlp, layernorm and others that "
        "megatron-core supports (default: core_attn)",
    )
    memory_flags.add_activation_offloading(add)


def _faults(add: Add) -> None:
    add(
        "--no-check-for-nan-in-loss-and-grad",
        action="store_false",
        dest="check_for_nan_in_loss_and_grad",
        help="continue even if the loss or a gradient is NaN or infinite",
    )
    add(
        "--loss-spike-policy",
        choices=["note", "skip", "rewind"],
        default="note",
        help="what to do about a loss spike or a NaN loss; note: log it (and stop at NaN); skip: skip "
        "the update; rewind: return to the newest valid checkpoint in --save and skip the data "
        "since then",
    )
    add(
        "--rerun-mode",
        choices=["disabled", "validate_results"],
        default="disabled",
        help=(
            "what to do before acting on a loss spike or NaN; validate_results: repeat the iteration, to "
            "distinguish a faulty device from bad data"
        ),
    )
    add(
        "--iterations-to-skip",
        type=whole,
        nargs="*",
        default=[],
        metavar="N",
        help="iterations to skip without training, counted from 0, as upstream does: N is the iteration "
        "that the log calls N + 1",
    )
    add_shared(add, "--check-weight-hash-across-dp-replicas-interval")


def _fusions(add: Add) -> None:
    for dest, what in (
        ("masked_softmax_fusion", "scaling, mask and softmax of the unfused attention"),
        ("bias_gelu_fusion", "bias and GELU"),
        ("bias_swiglu_fusion", "bias and gated SiLU"),
        ("bias_dropout_fusion", "bias, dropout and residual addition"),
        ("gradient_accumulation_fusion", "weight gradients and their accumulation over micro batches"),
    ):
        flag = f"--no-{dest.replace('_', '-')}"
        add(flag, action="store_false", dest=dest, help=f"do not fuse {what}")
    add("--cross-entropy-loss-fusion", action="store_true", help="compute the loss with one fused operation")
    add(
        "--cross-entropy-fusion-impl",
        choices=["native", "linear"],
        default="native",
        help="implementation of --cross-entropy-loss-fusion; linear: fuse the loss with the output layer "
        "and compute it block by block over the vocabulary, so that the full logits are never stored",
    )


_KEPT = {
    "main_grads": "gradients",
    "main_params": "the main copy of 16-bit weights",
    "exp_avg": "the running mean of the gradients",
    "exp_avg_sq": "the running mean of their squares",
}


def _optimizer(add: Add) -> None:
    add(
        "--optimizer",
        choices=["adam", "muon"],
        default="adam",
        help="optimizer; muon: Muon for the layers' matrices and Adam for all other weights; "
        "needs megatron-core 0.16 or later",
    )
    add_shared(add, "--lr", help="peak learning rate; required for training")
    add_shared(add, "--min-lr")
    add(
        "--lr-decay-style",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
        default="linear",
        help="shape of the learning-rate decay after the warm-up; WSD: warm-up, stable phase, decay",
    )
    add_shared(add, "--lr-decay-iters")
    add(
        "--lr-decay-samples",
        type=positive,
        help="length of the learning-rate decay in samples, with --train-samples (default: --train-samples)",
    )
    add(
        "--lr-wsd-decay-style",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
        default="exponential",
        help="shape of WSD's decay phase",
    )
    add("--lr-wsd-decay-iters", type=positive, help="length of WSD's decay phase in iterations")
    add(
        "--lr-wsd-decay-samples",
        type=positive,
        help="length of WSD's decay phase in samples, with --train-samples",
    )
    add_shared(
        add,
        "--lr-warmup-iters",
        help="number of iterations over which the learning rate rises from --lr-warmup-init to --lr",
    )
    add(
        "--lr-warmup-samples",
        type=whole,
        default=0,
        help="length of the learning-rate warm-up in samples, with --train-samples",
    )
    add(
        "--lr-warmup-fraction",
        type=number,
        help="length of the learning-rate warm-up as a fraction of the decay, from 0 to 1",
    )
    add("--lr-warmup-init", type=number, default=0.0, help="learning rate at the start of the warm-up")
    add_shared(add, "--weight-decay")
    add(
        "--start-weight-decay",
        type=number,
        help="initial weight decay of a weight-decay schedule (default: --weight-decay)",
    )
    add(
        "--end-weight-decay",
        type=number,
        help="final weight decay of a weight-decay schedule (default: --weight-decay)",
    )
    add(
        "--weight-decay-incr-style",
        choices=["constant", "linear", "cosine"],
        default="constant",
        help="shape of the change from --start-weight-decay to --end-weight-decay",
    )
    add_shared(add, "--clip-grad", "--adam-beta1", "--adam-beta2", "--adam-eps")
    add(
        "--use-precision-aware-optimizer",
        action="store_true",
        help="use the dtypes of the next four flags for Adam's states; needs --use-distributed-optimizer",
    )
    for what, types in memory_flags.NARROW.items():
        flag = f"--{what.replace('_', '-')}-dtype"
        add(flag, choices=types, default="fp32", help=f"dtype of {_KEPT[what]}")
    memory_flags.add_reuse_of_weights(add)
    add(
        "--override-opt_param-scheduler",
        action="store_true",
        help="on resume, use the learning-rate schedule given by the flags",
    )
    add(
        "--use-checkpoint-opt_param-scheduler",
        action="store_true",
        help="on resume, use the learning-rate schedule stored in the checkpoint",
    )


def _precision(add: Add) -> None:
    add("--bf16", action="store_true", help="compute in bfloat16; the optimizer keeps fp32 main weights")
    add("--fp16", action="store_true", help="compute in float16; the optimizer keeps fp32 main weights")
    add(
        "--accumulate-allreduce-grads-in-fp32",
        action="store_true",
        help="accumulate and reduce gradients in fp32; --bf16 always does",
    )
    add("--loss-scale", type=number, help="constant loss scale (default: a dynamic one with --fp16)")
    add("--initial-loss-scale", type=number, default=2.0**32, help="initial value of the dynamic loss scale")
    add("--min-loss-scale", type=number, default=1.0, help="minimum value of the dynamic loss scale")
    add(
        "--loss-scale-window",
        type=positive,
        default=1000,
        help="number of iterations without overflow before the dynamic loss scale is doubled",
    )
    add(
        "--hysteresis",
        type=positive,
        default=2,
        help="number of overflows before the dynamic loss scale is halved",
    )


def _data(add: Add) -> None:
    add(
        "--data-path",
        nargs="*",
        metavar="PREFIX",
        help="training data: the prefix of a .bin and .idx file, several prefixes, or "
        "alternating weights and prefixes",
    )
    add("--mock-data", action="store_true", help="train on synthetic tokens instead of --data-path")
    add(
        "--split",
        metavar="A,B,C",
        help="proportions in which the documents of --data-path are split into training, validation and "
        "test data (default: 969, 30, 1)",
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
            help=f"data for {use}, in the same form as --data-path; all documents are used",
        )
    flags.add_tokenizer(
        add,
        ["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"],
        "NullTokenizer: data that already consists of token ids",
    )
    add(
        "--vocab-size",
        type=positive,
        help="vocabulary size of the NullTokenizer, without its end-of-document token, or of a model whose "
        "embedding has more rows than its tokenizer has tokens",
    )
    flags.add_null_end(add)
    add_shared(add, "--data-cache-path")
    add(
        "--num-workers",
        type=whole,
        help="number of data-loading processes (default: 0 on the cpu device, else 2)",
    )
    add_shared(add, "--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask")


def _checkpoints(add: Add) -> None:
    add_shared(add, "--save", help="folder for checkpoints and the summary of the run")
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
        help="load a checkpoint without verifying its checksums",
    )
    add_shared(add, "--save-interval", "--save-per-machine", "--object-storage")
    add(
        "--async-save",
        action="store_true",
        help="write checkpoints in separate processes while training continues",
    )
    job_flags.add_retention(add)
    add("--finetune", action="store_true", help="load only the weights of --load and start at iteration 0")
    add("--no-load-optim", action="store_true", help="do not load the optimizer state")
    add("--no-load-rng", action="store_true", help="do not load the random states; use --seed")
    add("--no-save-optim", action="store_true", help="do not save the optimizer state")
    add("--no-save-rng", action="store_true", help="do not save the random states")
    add(
        "--ckpt-format",
        choices=["torch_dist"],
        default="torch_dist",
        help="checkpoint format; only torch_dist is supported",
    )
    add(
        "--dist-ckpt-optim-fully-reshardable",
        action="store_true",
        help="save the distributed optimizer in a form that can resume with other tensor- and "
        "pipeline-parallel sizes",
    )


def _logging(add: Add) -> None:
    add_shared(add, "--log-interval", default=100)
    add(
        "--log-throughput",
        action="store_true",
        help="accepted for compatibility; throughput is always logged",
    )
    add(
        "--eval-interval",
        type=positive,
        help="iterations between two validations (default: validate once, at the end)",
    )
    add(
        "--eval-iters",
        type=whole,
        default=100,
        help="number of global batches per validation; 0: no validation",
    )
    job_flags.add_validation(add)
    add(
        "--eval-train-loss",
        action="store_true",
        help="at each validation, also evaluate the first --eval-iters global batches of the training data",
    )
    add(
        "--log-loss-per-rank",
        action="store_true",
        help="after each iteration's line, log the loss of each data-parallel rank on a separate line",
    )
    add_shared(add, "--tensorboard-dir")
    job_flags.add_wandb(add)
    add_shared(add, "--json-log")
    add(
        "--sample-prompt",
        nargs="+",
        metavar="TEXT",
        help="generate a sample from each prompt at each validation; an empty prompt gives an "
        "unconditional sample (default: none)",
    )
    add(
        "--sample-tokens",
        type=positive,
        default=50,
        help="maximum number of tokens to add to a --sample-prompt",
    )
    add(
        "--sample-temperature",
        type=number,
        default=0.0,
        help="divide the logits of --sample-prompt by this temperature; 0: greedy decoding",
    )
    add(
        "--dashboard",
        type=address,
        metavar="[HOST:]PORT",
        help="serve a dashboard of the run at this address; port 0 selects any free port (default: no "
        "dashboard; HOST: 127.0.0.1)",
    )
    add_shared(
        add,
        "--plot",
        help="PNG file for the plot of loss and learning rate, updated at each validation and at the end "
        "(default: written with --save, if matplotlib is installed)",
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
