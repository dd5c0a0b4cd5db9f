"""Check the optimizer flags of a stock script."""

from __future__ import annotations

import argparse

from megatron_npu.base.errors import UsageError


def refuse_offload_in_fp32(args: argparse.Namespace) -> None:
    """Reject optimizer offloading for fp32 parameters before the run starts.

    Upstream can only offload fp32 copies.
    """
    if args.optimizer_cpu_offload and not (args.bf16 or args.fp16):
        raise UsageError(
            "--optimizer-cpu-offload requires --bf16 or --fp16, because Megatron cannot offload fp32 "
            "parameters. Add one of them, or remove --optimizer-cpu-offload."
        )


def refuse_muon_without_its_package(args: argparse.Namespace) -> None:
    """Reject Muon and related optimizers if their package is not installed or computes different results."""
    if args.optimizer in ("adam", "sgd"):
        return
    try:
        import emerging_optimizers.orthogonalized_optimizers as found
    except ImportError as error:
        raise UsageError(
            f"--optimizer {args.optimizer} requires the package emerging_optimizers, which cannot be "
            f"imported ({error}). Install it: pip install --no-deps --ignore-requires-python "
            "emerging_optimizers==0.3.0"
        ) from error
    if args.optimizer == "adaptive_muon" and hasattr(
        getattr(found, "AdaptiveMuon", None), "_apply_muon_scale"
    ):
        raise UsageError(
            "--optimizer adaptive_muon requires emerging_optimizers 0.2, because Megatron 0.18 and 0.19 "
            "scale the updates before the second moments, whereas version 0.3 scales them after. Install "
            "emerging_optimizers from the tag v0.2.0 of its repository, or use --optimizer muon."
        )


def refuse_lion_that_nothing_builds(args: argparse.Namespace) -> None:
    """Reject the Lion optimizer in versions whose scripts have its flags but are unable to build it
    (0.17).
    """
    from megatron.core import package_info

    if args.optimizer == "lion" and (package_info.MAJOR, package_info.MINOR) < (0, 18):
        raise UsageError(
            f"--optimizer lion cannot be used with Megatron {package_info.__version__}, because the scripts "
            "of this version accept lion but cannot build it. Use adam, sgd, muon or dist_muon "
            "(--muon-scalar-optimizer lion works), or Megatron 0.18 or newer."
        )


def refuse_soap_that_cannot_be_saved(args: argparse.Namespace) -> None:
    """Reject the SOAP optimizer with distributed checkpoints, because the first save would fail (0.18,
    0.19).
    """
    if args.optimizer == "soap" and args.save and args.ckpt_format != "torch":
        raise UsageError(
            f"--optimizer soap cannot save with --ckpt-format {args.ckpt_format}, because in formats other "
            "than torch Megatron mistakes SOAP's preconditioners for copies of the weights. Use "
            "--ckpt-format torch."
        )


def refuse_shares_that_cannot_be_saved(args: argparse.Namespace) -> None:
    """Reject sharded Muon and related optimizers with --ckpt-format torch, because a save would fail
    (0.18).
    """
    from megatron.core import package_info

    kin = args.optimizer not in ("adam", "sgd") and (package_info.MAJOR, package_info.MINOR) == (0, 18)
    shared = args.optimizer == "dist_muon" or args.use_distributed_optimizer
    if kin and shared and args.use_layer_wise_param_layout and args.save and args.ckpt_format == "torch":
        raise UsageError(
            f"--optimizer {args.optimizer} with a distributed optimizer cannot save with --ckpt-format "
            "torch in Megatron 0.18, because that format calls a method that chained optimizers do not "
            "have. Use --ckpt-format torch_dist, or add --no-use-layer-wise-param-layout."
        )
