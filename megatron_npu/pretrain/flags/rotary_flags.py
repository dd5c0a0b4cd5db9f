"""Declare the flags of rotary embeddings, using Megatron's names where they exist."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron_npu.base.arg_parser import integer, number, positive

Add = Callable[..., Any]

LLAMA3, DYNAMIC = "llama3", "dynamic"
# What --use-rope-scaling takes beside its factor, which no script of Megatron's has: attributes of the
# arguments, and what megatron-core has built in (0.12 to 0.19).
OF_CORE: Mapping[str, object] = MappingProxyType(
    {
        "rope_scaling_type": LLAMA3,
        "rope_scaling_original_max_position_embeddings": 8192,
        "rope_scaling_low_freq_factor": 1.0,
        "rope_scaling_high_freq_factor": 4.0,
    }
)
NAMES = tuple(OF_CORE)
# What --position-embedding-type yarn takes: of 0.19's scripts. The last three are of MLA's yarn as well.
YARN = tuple(
    """
    yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
    rotary_scaling_factor mscale mscale_all_dim
    """.split()
)
ROTATED = ("rope", "yarn")  # values of --position-embedding-type


def add(add: Add) -> None:
    """Add to a parser the flags that apply to every rotary embedding."""
    add(
        "--rotary-percent",
        type=number,
        default=1.0,
        help="fraction of each head's channels that is rotated, from 0 to 1",
    )
    add("--rotary-base", type=integer, default=10000, help="base of the rotary frequencies")
    add(
        "--rotary-interleaved",
        action="store_true",
        help="rotate adjacent elements instead of the two halves of a head",
    )
    add(
        "--rotary-seq-len-interpolation-factor",
        type=number,
        help="factor by which positions are divided to extend the context (default: 1)",
    )
    add(
        "--use-rope-scaling",
        action="store_true",
        help="scale the low rotary frequencies as Llama 3.1 does, or as --rope-scaling-type specifies",
    )
    add(
        "--rope-scaling-factor",
        type=number,
        default=8.0,
        help="factor by which --use-rope-scaling lowers the frequencies",
    )
    add_scaling(add)
    add_yarn(add)


def add_scaling(add: Add) -> None:
    """Add to a parser the flags that only ``--use-rope-scaling`` uses."""
    add(
        "--rope-scaling-type",
        choices=[LLAMA3, DYNAMIC],
        default=LLAMA3,
        help="type of rotary scaling; dynamic: the base grows once the text exceeds the original length",
    )
    add(
        "--rope-scaling-original-max-position-embeddings",
        type=positive,
        default=8192,
        help="original maximum number of positions, before --use-rope-scaling extends it",
    )
    add(
        "--rope-scaling-low-freq-factor",
        type=number,
        default=1.0,
        help="for llama3: scale frequencies whose wavelength exceeds original length / X",
    )
    add(
        "--rope-scaling-high-freq-factor",
        type=number,
        default=4.0,
        help="for llama3: keep frequencies whose wavelength is below original length / X",
    )


def add_yarn(add: Add) -> None:
    """Add to a parser the flags that only ``--position-embedding-type yarn`` uses."""
    add(
        "--yarn-original-max-position-embeddings",
        type=positive,
        default=4096,
        help="for --position-embedding-type yarn: original maximum number of positions, before the extension",
    )
    add(
        "--yarn-beta-fast",
        type=number,
        default=32.0,
        help="for yarn: keep frequencies that make more rotations than this within the original length",
    )
    add(
        "--yarn-beta-slow",
        type=number,
        default=1.0,
        help="for yarn: interpolate frequencies that make fewer rotations than this within the original "
        "length",
    )
    add(
        "--no-yarn-correction-range-round-to-int",
        action="store_false",
        dest="yarn_correction_range_round_to_int",
        help="for yarn: do not round the bounds of the interpolation range to integers",
    )


def concentration(args: Namespace) -> float:
    """Return the factor by which ``--position-embedding-type yarn`` scales queries and keys."""
    factor = args.rotary_scaling_factor
    return _stretched(factor, args.mscale) / _stretched(factor, args.mscale_all_dim)


def _stretched(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
