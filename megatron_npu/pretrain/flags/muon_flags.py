"""The driver's flags for Muon: Megatron's names and defaults (Jordan et al. 2024, arXiv:2502.16982)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import number, positive
from megatron_npu.base.installed_packages import is_installed

Add = Callable[..., Any]

PACKAGE = "emerging_optimizers"  # which megatron-core takes Muon from
SINCE = (0, 16)  # of megatron-core
COEFFICIENTS_SINCE = (0, 17)  # quintic before
COEFFICIENTS = ("simple", "quintic", "polar_express")


def add(add: Add) -> None:
    """Add what means something together with ``--optimizer muon`` alone."""
    add("--muon-momentum", type=number, default=0.9, help="decay of the mean of gradients, a step")
    add(
        "--muon-nesterov",
        "--muon-use-nesterov",  # its name in 0.17
        action="store_true",
        help="look one step of that mean ahead",
    )
    add(
        "--muon-no-split-qkv",
        action="store_false",
        dest="muon_split_qkv",
        help="make queries, keys and values orthogonal as one matrix, not each for itself",
    )
    add(
        "--muon-scale-mode",
        choices=["spectral", "unit_rms_norm", "shape_scaling"],
        default="spectral",
        help="how the length of an update follows from the matrix's shape",
    )
    add(
        "--muon-fp32-matmul-prec",
        choices=["medium", "high", "highest"],  # upstream's low is none of torch's
        default="medium",
        help="of products in Newton and Schulz's iteration in fp32; medium: a CPU may round to bf16",
    )
    add(
        "--muon-coefficient-type",
        choices=list(COEFFICIENTS),
        default="quintic",
        help="of the polynomials of that iteration",
    )
    add("--muon-num-ns-steps", type=positive, default=5, help="its steps")
    add(
        "--muon-tp-mode",
        choices=["blockwise", "duplicated", "distributed"],
        default="blockwise",
        help="tensor-parallel ranks: each its part by itself (another update than that of one process), "
        "all the whole matrix, or the whole matrix together",
    )
    add("--muon-extra-scale-factor", type=number, default=1.0, help="further factor of an update")


def installed() -> bool:
    """Return whether the package that has Muon is there."""
    return is_installed(PACKAGE)
