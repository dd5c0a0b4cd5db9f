"""Declare the flags of mixture-of-experts models, with Megatron's names, meanings and defaults."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any

from megatron_npu.base import digits
from megatron_npu.base.arg_parser import Unfit, number, positive

Add = Callable[..., Any]

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_MOST_LAYERS = 10_000
_EXAMPLE = "a number, or a pattern such as ([0]*1+[1]*3)*2"


def layer_frequency(text: str) -> int | list[int]:
    """Parse ``--moe-layer-freq``: the interval between layers with experts, or a list with 0 or 1 for each
    layer.

    Upstream evaluates the text as Python. Here, only integers and lists of 0 and 1 combined with ``+`` and
    ``*`` are accepted, with the same meaning.

    Raises:
        Unfit: the value is neither an integer nor such a list.
    """
    if every := digits.number(text):
        return every
    try:
        value = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unfit(text, _EXAMPLE) from None
    if not isinstance(value, list):
        raise Unfit(text, _EXAMPLE)
    return value


def _pattern(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        values = [_pattern(item) for item in node.elts]
        if all(value in (0, 1) for value in values):
            return values  # type: ignore[return-value]  # each is 0 or 1
    if isinstance(node, ast.BinOp):
        layers = _combined(node.op, _pattern(node.left), _pattern(node.right))
        if layers is not None:
            return layers
    raise ValueError("the layer pattern is invalid")


def _combined(operator: ast.operator, left: int | list[int], right: int | list[int]) -> list[int] | None:
    if isinstance(operator, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(operator, ast.Mult) and isinstance(left, list) != isinstance(right, list):
        times, layers = (left, right) if isinstance(left, int) else (right, left)
        if times * len(layers) <= _MOST_LAYERS:  # type: ignore[operator, arg-type]
            return times * layers  # type: ignore[operator, return-value]
    return None


class _OneOrMany(argparse.Action):
    """Argument action that stores a single value as a scalar and several values as a list, as Megatron
    does.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def of_a_dense_model() -> dict[str, Any]:
    """Return the values of the expert flags for a model without experts, such as one from an old
    checkpoint.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add(parser.add_argument)
    return vars(parser.parse_args([])) | {"expert_tensor_parallel_size": 1}


def add(add: Add) -> None:
    """Add to a parser the flags of mixture-of-experts models.

    All except ``--num-experts`` have an effect only together with ``--num-experts``.
    """
    _model(add)
    _router(add)
    _balance(add)
    _computation(add)


def _model(add: Add) -> None:
    add(
        "--num-experts",
        type=positive,
        help="number of experts per layer (default: none, all layers are dense)",
    )
    add(
        "--moe-layer-freq",
        type=layer_frequency,
        default=1,
        metavar="N|PATTERN",
        help="use experts in every Nth layer, starting with the first; or a list with 1 for each layer with "
        "experts and 0 for each dense layer, such as ([0]*1+[1]*3)*2",
    )
    add("--moe-ffn-hidden-size", type=positive, help="inner size of each expert (default: --ffn-hidden-size)")
    add(
        "--moe-shared-expert-intermediate-size",
        type=positive,
        help="total inner size of the shared experts, which process every token (default: no shared experts)",
    )
    add(
        "--moe-shared-expert-gate",
        action="store_true",
        help="scale the shared expert's output by a sigmoid gate that is a linear function of the token",
    )


def _router(add: Add) -> None:
    add("--moe-router-topk", type=positive, default=2, help="number of experts selected for each token")
    add(
        "--moe-router-score-function",
        choices=["softmax", "sigmoid"],
        default="softmax",
        help="function that turns the router's logits into scores",
    )
    add(
        "--moe-router-pre-softmax",
        action="store_true",
        help="compute scores over all experts before the top-k selection, so that the "
        "selected scores need not sum to 1",
    )
    add(
        "--moe-router-topk-scaling-factor",
        type=number,
        help="scaling factor for the router's scores (default: 1)",
    )
    add("--moe-router-num-groups", type=positive, help="number of expert groups for group-limited routing")
    add(
        "--moe-router-group-topk",
        type=positive,
        help="number of expert groups from which each token's experts are selected",
    )
    add(
        "--moe-router-dtype",
        choices=["fp32", "fp64"],
        help="dtype of the router's computation (default: the model's)",
    )
    add(
        "--moe-router-enable-expert-bias",
        action="store_true",
        help="balance experts with a bias that is added to the selection scores and updated after each step "
        "(arXiv:2408.15664)",
    )
    add(
        "--moe-router-bias-update-rate",
        type=number,
        default=1e-3,
        help="amount by which --moe-router-enable-expert-bias changes a bias per update",
    )
    add(
        "--moe-router-force-load-balancing",
        action="store_true",
        help="use random router logits, to measure the speed of a balanced run; the model does not learn",
    )
    add(
        "--moe-input-jitter-eps",
        type=number,
        help="multiply the router's input by noise in 1 ± eps (default: none)",
    )


def _balance(add: Add) -> None:
    add(
        "--moe-router-load-balancing-type",
        nargs="+",
        action=_OneOrMany,
        choices=BALANCING,
        default="aux_loss",
        help="how to balance the experts' load: an auxiliary loss over the micro batch, each sequence or "
        "the global batch; sinkhorn assignment; or none",
    )
    add(
        "--moe-aux-loss-coeff",
        type=number,
        nargs="+",
        action=_OneOrMany,
        default=0.0,
        help="weight of each auxiliary balancing loss; 0.01 is a good starting point",
    )
    add(
        "--moe-z-loss-coeff",
        type=number,
        help="weight of the router's z-loss; 0.001 is a good starting point",
    )
    add("--moe-per-layer-logging", action="store_true", help="also log the balancing losses of each layer")
    add(
        "--moe-expert-capacity-factor",
        type=number,
        help="maximum number of tokens per expert, as a multiple of an equal share (default: no limit)",
    )
    add(
        "--moe-token-drop-policy",
        choices=["probs", "position"],
        default="probs",
        help="which tokens an expert drops if it exceeds its capacity; probs: those with the lowest scores; "
        "position: the last ones",
    )
    add(
        "--moe-pad-expert-input-to-capacity",
        action="store_true",
        help="pad each expert's input to its capacity",
    )


def _computation(add: Add) -> None:
    add(
        "--expert-model-parallel-size",
        type=positive,
        default=1,
        help="expert-parallel size: number of ranks over which the experts are distributed",
    )
    add(
        "--expert-tensor-parallel-size",
        type=positive,
        help="tensor-parallel size within each expert (default: --tensor-model-parallel-size)",
    )
    add(
        "--moe-token-dispatcher-type",
        choices=["allgather", "alltoall", "flex"],
        default="allgather",
        help="how tokens are sent to their experts; alltoall sends fewer bytes",
    )
    add(
        "--moe-shared-expert-overlap",
        action="store_true",
        help="compute the shared expert during the token exchange; needs alltoall",
    )
    add(
        "--moe-grouped-gemm",
        action="store_true",
        help="compute all experts of a rank with one grouped matmul",
    )
    add(
        "--moe-permute-fusion",
        action="store_true",
        help="permute tokens by expert, and back, with one fused operation; needs alltoall",
    )
    add(
        "--moe-router-fusion",
        action="store_true",
        help="select experts with fused operations and a single fused backward pass",
    )
