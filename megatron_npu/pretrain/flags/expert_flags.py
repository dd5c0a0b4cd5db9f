"""The driver's flags for a mixture of experts: Megatron's names, meanings and defaults, as all others."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import Unfit, number, positive

Add = Callable[..., Any]

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_MOST_LAYERS = 10_000
_EXAMPLE = "a number, or a pattern such as ([0]*1+[1]*3)*2"


def layer_frequency(text: str) -> int | list[int]:
    """Return what ``--moe-layer-freq`` says: every how many layers one has experts, or 0 or 1 for each layer.

    Upstream evaluates the text as Python; here lists of 0 and 1, ``+`` and ``*`` mean the same, and nothing
    else means anything.

    Raises:
        Unfit: neither.
    """
    if text.isdecimal() and int(text):
        return int(text)
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
    raise ValueError("no pattern of layers")


def _combined(operator: ast.operator, left: int | list[int], right: int | list[int]) -> list[int] | None:
    if isinstance(operator, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(operator, ast.Mult) and isinstance(left, list) != isinstance(right, list):
        times, layers = (left, right) if isinstance(left, int) else (right, left)
        if times * len(layers) <= _MOST_LAYERS:  # type: ignore[operator, arg-type]
            return times * layers  # type: ignore[operator, return-value]
    return None


class _OneOrMany(argparse.Action):
    """Keep one value by itself and several as a list, as Megatron does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def of_a_dense_model() -> dict[str, Any]:
    """Return the values of all these flags for a model without experts, as an old checkpoint has them."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser.add_argument)
    return vars(parser.parse_args([])) | {"expert_tensor_parallel_size": 1}


def add(add: Add) -> None:
    """Add the flags; all but ``--num-experts`` mean something together with it alone."""
    _model(add)
    _router(add)
    _balance(add)
    _computation(add)


def _model(add: Add) -> None:
    add("--num-experts", type=positive, help="experts of a layer (default: none, every layer is dense)")
    add(
        "--moe-layer-freq",
        type=layer_frequency,
        default=1,
        metavar="N|PATTERN",
        help="experts in every Nth layer, from the first on; or 1 for a layer with experts and 0 for a dense "
        "one: ([0]*1+[1]*3)*2",
    )
    add("--moe-ffn-hidden-size", type=positive, help="inner size of an expert (default: --ffn-hidden-size)")
    add(
        "--moe-shared-expert-intermediate-size",
        type=positive,
        help="inner size of the expert, or of all together, that every token takes (default: none)",
    )
    add(
        "--moe-shared-expert-gate",
        action="store_true",
        help="weigh the shared expert by the sigmoid of a linear function of the token",
    )


def _router(add: Add) -> None:
    add("--moe-router-topk", type=positive, default=2, help="experts of a token")
    add(
        "--moe-router-score-function",
        choices=["softmax", "sigmoid"],
        default="softmax",
        help="what makes scores of the router's logits",
    )
    add(
        "--moe-router-pre-softmax",
        action="store_true",
        help="scores over all experts, so that those of a token's experts need not sum to 1",
    )
    add("--moe-router-topk-scaling-factor", type=number, help="multiplies the scores (default: 1)")
    add("--moe-router-num-groups", type=positive, help="groups of experts, of which a token takes some")
    add("--moe-router-group-topk", type=positive, help="groups that a token takes its experts from")
    add(
        "--moe-router-dtype",
        choices=["fp32", "fp64"],
        help="type of the router's computation (default: that of the model)",
    )
    add(
        "--moe-router-enable-expert-bias",
        action="store_true",
        help="balance by a bias on the scores that choose, moved after each step (arXiv:2408.15664)",
    )
    add("--moe-router-bias-update-rate", type=number, default=1e-3, help="by which that bias is moved")
    add(
        "--moe-router-force-load-balancing",
        action="store_true",
        help="random logits, to measure a balanced run; it learns nothing",
    )
    add("--moe-input-jitter-eps", type=number, help="noise on the router's input, 1 ± eps (default: none)")


def _balance(add: Add) -> None:
    add(
        "--moe-router-load-balancing-type",
        nargs="+",
        action=_OneOrMany,
        choices=BALANCING,
        default="aux_loss",
        help="how experts get equal shares: a loss over the micro batch, each sequence or the global batch; "
        "sinkhorn's assignment; none",
    )
    add(
        "--moe-aux-loss-coeff",
        type=number,
        nargs="+",
        action=_OneOrMany,
        default=0.0,
        help="weight of each of these losses; 0.01 is a good start",
    )
    add("--moe-z-loss-coeff", type=number, help="weight of the router's z-loss; 0.001 is a good start")
    add("--moe-per-layer-logging", action="store_true", help="log these losses of each layer, too")
    add(
        "--moe-expert-capacity-factor",
        type=number,
        help="tokens that an expert takes at most, as a multiple of its equal share (default: all)",
    )
    add(
        "--moe-token-drop-policy",
        choices=["probs", "position"],
        default="probs",
        help="which tokens it leaves out: those of the lowest score, or the last ones",
    )
    add(
        "--moe-pad-expert-input-to-capacity",
        action="store_true",
        help="give each expert as many tokens as it can take",
    )


def _computation(add: Add) -> None:
    add("--expert-model-parallel-size", type=positive, default=1, help="ranks that share the experts")
    add(
        "--expert-tensor-parallel-size",
        type=positive,
        help="ranks that share each expert (default: --tensor-model-parallel-size)",
    )
    add(
        "--moe-token-dispatcher-type",
        choices=["allgather", "alltoall", "flex"],
        default="allgather",
        help="how tokens reach their experts; alltoall sends fewer",
    )
    add(
        "--moe-shared-expert-overlap",
        action="store_true",
        help="compute the shared expert while tokens travel; needs alltoall",
    )
    add("--moe-grouped-gemm", action="store_true", help="one grouped product for the experts of a rank")
    add(
        "--moe-permute-fusion",
        action="store_true",
        help="sort tokens by their experts in one operation, and back; needs alltoall",
    )
    add(
        "--moe-router-fusion", action="store_true", help="choose experts in few operations, with one gradient"
    )
