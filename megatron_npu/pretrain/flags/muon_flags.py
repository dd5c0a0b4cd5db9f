"""Declare the flags of Muon (Jordan et al. 2024, arXiv:2502.16982), with Megatron's names and defaults."""

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
    """Add to a parser the flags that only ``--optimizer muon`` uses."""
    add("--muon-momentum", type=number, default=0.9, help="momentum of Muon's gradient averaging")
    add(
        "--muon-nesterov",
        "--muon-use-nesterov",  # its name in 0.17
        action="store_true",
        help="use Nesterov momentum in Muon",
    )
    add(
        "--muon-no-split-qkv",
        action="store_false",
        dest="muon_split_qkv",
        help="orthogonalize the fused QKV matrix as a whole instead of Q, K and V separately",
    )
    add(
        "--muon-scale-mode",
        choices=["spectral", "unit_rms_norm", "shape_scaling"],
        default="spectral",
        help="how to scale Muon's update by the shape of the matrix",
    )
    add(
        "--muon-fp32-matmul-prec",
        choices=["medium", "high", "highest"],  # upstream's low is none of torch's
        default="medium",
        help="precision of fp32 matmuls in the Newton-Schulz iteration; medium: a CPU may round inputs to "
        "bf16",
    )
    add(
        "--muon-coefficient-type",
        choices=list(COEFFICIENTS),
        default="quintic",
        help="coefficients of the Newton-Schulz polynomials",
    )
    add("--muon-num-ns-steps", type=positive, default=5, help="number of Newton-Schulz steps")
    add(
        "--muon-tp-mode",
        choices=["blockwise", "duplicated", "distributed"],
        default="blockwise",
        help="how Muon treats tensor-parallel matrices; blockwise: each rank orthogonalizes its own part, "
        "which changes the update compared to a single process; duplicated: every rank computes the "
        "whole matrix; distributed: the ranks compute the whole matrix together",
    )
    add("--muon-extra-scale-factor", type=number, default=1.0, help="extra scaling factor for Muon's update")


def installed() -> bool:
    """Return True if the package that provides Muon is installed."""
    return is_installed(PACKAGE)
