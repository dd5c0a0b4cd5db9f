"""Checks of the scripts' arguments before upstream's own: adapted, or refused before anything is built."""

from __future__ import annotations

import argparse
import contextlib
import sys
import types
from typing import Any

import pytest

from megatron_npu.adaptors.megatron_core.layers import activation_offloading
from megatron_npu.adaptors.megatron_core.options import argument_checks, arguments, optimizer_checks
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.patching.registry import registry
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")


def checks(*names: str) -> tuple[argument_checks.Check, ...]:
    """The checks of these names alone: the others want more arguments."""
    return tuple(check for check in arguments.CHECKS if check.name in names)


@pytest.mark.parametrize(("flags", "refused"), [({}, True), ({"bf16": True}, False), ({"fp16": True}, False)])
def test_fp32_parameters_are_not_offloaded(flags, refused, monkeypatch):
    """Upstream's optimizer of views would end in a ValueError, after the model has been built."""
    given = {"optimizer_cpu_offload": True, "bf16": False, "fp16": False, **flags}
    args = argparse.Namespace(**given)
    monkeypatch.setattr(arguments, "CHECKS", checks("refuse_offload_in_fp32"))
    if refused:
        with pytest.raises(UsageError, match="--optimizer-cpu-offload requires --bf16 or --fp16"):
            arguments.validate_args(lambda args: args, args)
    else:
        assert arguments.validate_args(lambda args: args, args) is args
    args.optimizer_cpu_offload = False
    assert arguments.validate_args(lambda args: args, args) is args


@pytest.mark.parametrize("given", [None, 0, 7])
def test_without_an_interval_nothing_is_evaluated_before_the_end(given: int | None) -> None:
    args = argparse.Namespace(eval_interval=given)
    argument_checks.evaluate_at_the_end_alone(args)
    assert args.eval_interval == given or (given is None and 10**9 // args.eval_interval == 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"rotary_seq_len_interpolation_factor": 4},
            ["--rotary-seq-len-interpolation-factor 4"],
        ),
        ({"rotary_seq_len_interpolation_factor": 1}, []),
        ({"rope_scaling_factor": 32.0, "use_rope_scaling": True}, ["--rope-scaling-factor 32"]),
        ({"rope_scaling_factor": 32.0, "use_rope_scaling": False}, []),
        ({"rope_scaling_factor": 8.0, "use_rope_scaling": True}, []),
        ({}, []),
    ],
)
def test_flags_of_positions_without_effect_are_said(given, said, monkeypatch, caplog) -> None:
    monkeypatch.setattr(arguments, "CHECKS", checks("tell_factors_without_effect"))
    monkeypatch.delenv(settings.BACKPORT.name, raising=False)
    args = argparse.Namespace(**given)
    assert arguments.validate_args(lambda args: args, args) is args
    assert [record.message.partition(" has no effect, because")[0] for record in caplog.records] == said
    caplog.clear()
    monkeypatch.setenv(settings.BACKPORT.name, "1")  # they have one then
    arguments.validate_args(lambda args: args, args)
    assert not caplog.records


def test_weights_of_xavier_are_refused() -> None:
    """Upstream hands the flag to a field that no configuration has: a TypeError when it is made."""
    with pytest.raises(UsageError, match="--init-method-xavier-uniform is not supported"):
        argument_checks.refuse_xavier_weights(argparse.Namespace(init_method_xavier_uniform=True))
    argument_checks.refuse_xavier_weights(argparse.Namespace(init_method_xavier_uniform=False))


def test_batches_that_are_dealt_out_are_not_run_again() -> None:
    args = argparse.Namespace(hybrid_context_parallel=True, rerun_mode="validate_results", train_iters=None)
    argument_checks.refuse_reruns_of_hybrid_batches(args)  # a program that only reads batches
    for count in ("train_iters", "train_samples"):
        given = argparse.Namespace(**{**vars(args), count: 8})
        with pytest.raises(UsageError, match="but got --rerun-mode validate_results"):
            argument_checks.refuse_reruns_of_hybrid_batches(given)
    args.train_iters = 8
    args.rerun_mode = "disabled"
    argument_checks.refuse_reruns_of_hybrid_batches(args)
    argument_checks.refuse_reruns_of_hybrid_batches(
        argparse.Namespace(rerun_mode="validate_results")
    )  # before 0.16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_grouped_gemm": True, "bf16": False}, "--moe-grouped-gemm without --bf16"),
        ({"moe_grouped_gemm": True, "add_bias_linear": True}, "--moe-grouped-gemm with biases"),
        (
            {"moe_token_dispatcher_type": "flex"},
            "--moe-token-dispatcher-type must be allgather or alltoall, because flex",
        ),
        (
            {"hierarchical_context_parallel_sizes": [2, 3]},
            "the product of --hierarchical-context-parallel-sizes must be --context-parallel-size 4, but "
            "got 2 3",
        ),
        ({"moe_grouped_gemm": True, "hierarchical_context_parallel_sizes": [2, 2]}, None),
        ({"moe_token_dispatcher_type": "flex", "num_experts": None, "bf16": False}, None),
    ],
)
def test_experts_and_ranks_that_upstream_refuses_in_an_assertion(changes, said) -> None:
    plain = {"num_experts": 4, "bf16": True, "add_bias_linear": False, "moe_grouped_gemm": False}
    plain |= {"moe_token_dispatcher_type": "alltoall", "context_parallel_size": 4}
    args = argparse.Namespace(**plain | changes)
    with pytest.raises(UsageError, match=f"^{said}") if said else contextlib.nullcontext():
        argument_checks.refuse_grouped_experts_of_other_kinds(args)
        argument_checks.refuse_flex_dispatching(args)
        argument_checks.refuse_wrong_hierarchical_sizes(args)


def _arguments(**values) -> argparse.Namespace:
    plain = {"profile": False, "use_pytorch_profiler": False, "record_memory_history": False}
    return argparse.Namespace(**{**plain, **values})


def test_tools_of_cuda_are_refused_before_anything_is_built() -> None:
    with pytest.raises(
        UsageError, match=f"--profile requires --use-pytorch-profiler on the {here().type} device"
    ):
        argument_checks.refuse_tools_of_cuda(_arguments(profile=True))
    both = _arguments(profile=True, use_pytorch_profiler=True)
    argument_checks.refuse_tools_of_cuda(both)
    assert both.profile
    history = _arguments(record_memory_history=True)
    if here().type == "cpu":
        with pytest.raises(UsageError, match="--record-memory-history is not supported on the cpu device"):
            argument_checks.refuse_tools_of_cuda(history)
    else:
        argument_checks.refuse_tools_of_cuda(history)
        assert history.record_memory_history


def test_muon_is_refused_without_its_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    optimizer_checks.refuse_muon_without_its_package(_arguments(optimizer="adam"))
    with pytest.raises(UsageError, match="pip install --no-deps"):
        optimizer_checks.refuse_muon_without_its_package(_arguments(optimizer="muon"))


@pytest.mark.parametrize(
    ("newer", "optimizer"), [(True, "adaptive_muon"), (False, "adaptive_muon"), (True, "soap")]
)
def test_adaptive_muon_is_refused_with_a_package_that_scales_later(monkeypatch, newer, optimizer) -> None:
    names = {"_apply_muon_scale": None} if newer else {}
    module = types.SimpleNamespace(AdaptiveMuon=type("AdaptiveMuon", (), names))
    package = types.SimpleNamespace(orthogonalized_optimizers=module)
    monkeypatch.setitem(sys.modules, "emerging_optimizers", package)
    monkeypatch.setitem(sys.modules, "emerging_optimizers.orthogonalized_optimizers", module)
    refused = newer and optimizer == "adaptive_muon"
    with (
        pytest.raises(UsageError, match=r"requires emerging_optimizers 0\.2")
        if refused
        else contextlib.nullcontext()
    ):
        optimizer_checks.refuse_muon_without_its_package(_arguments(optimizer=optimizer))


@pytest.mark.parametrize(
    ("minor", "optimizer", "refused"),
    [(17, "lion", True), (17, "muon", False), (18, "lion", False)],
)
def test_lion_is_refused_where_the_scripts_cannot_build_it(monkeypatch, minor, optimizer, refused) -> None:
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "MINOR", minor)
    with pytest.raises(UsageError, match="cannot build it") if refused else contextlib.nullcontext():
        optimizer_checks.refuse_lion_that_nothing_builds(_arguments(optimizer=optimizer))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"ckpt_format": "torch"}, False),
        ({"save": None}, False),
        ({"optimizer": "lion"}, False),
    ],
)
def test_soap_is_refused_where_its_save_would_end_the_run(changes, refused) -> None:
    args = _arguments(**{"optimizer": "soap", "save": "here", "ckpt_format": "torch_dist"} | changes)
    with pytest.raises(UsageError, match="Use --ckpt-format torch") if refused else contextlib.nullcontext():
        optimizer_checks.refuse_soap_that_cannot_be_saved(args)


@pytest.mark.parametrize(
    ("changes", "minor", "refused"),
    [
        ({}, 18, True),
        ({"optimizer": "dist_muon", "use_distributed_optimizer": False}, 18, True),
        ({"ckpt_format": "torch_dist"}, 18, False),
        ({"use_distributed_optimizer": False}, 18, False),
        ({"use_layer_wise_param_layout": False}, 18, False),
        ({"optimizer": "adam"}, 18, False),
        ({}, 19, False),
    ],
)
def test_muon_is_refused_where_its_shares_cannot_be_saved(monkeypatch, changes, minor, refused) -> None:
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "MINOR", minor)
    given = {"optimizer": "muon", "save": "here", "ckpt_format": "torch"}
    given |= {"use_distributed_optimizer": True, "use_layer_wise_param_layout": True}
    with pytest.raises(UsageError, match="a distributed optimizer") if refused else contextlib.nullcontext():
        optimizer_checks.refuse_shares_that_cannot_be_saved(_arguments(**given | changes))


def test_the_checks_of_this_device_run_in_order_before_upstreams(monkeypatch) -> None:
    ran: list[str] = []

    def check(name: str, **options: Any) -> argument_checks.Check:
        return argument_checks.Check(lambda _: ran.append(name), why="a test", **options)

    others = tuple({"npu", "cuda", "cpu"} - {here().type})
    checks = (
        check("first", devices=(here().type,)),
        check("of other devices", devices=others),
        check("not needed", condition=lambda: "something is installed"),
        check("last", condition=lambda: None),
    )
    monkeypatch.setattr(arguments, "CHECKS", checks)

    def validate(args: argparse.Namespace, defaults: dict[str, int], *, strict: bool) -> tuple[Any, ...]:
        ran.append("upstream")
        return args, defaults, strict

    args = _arguments()
    assert arguments.validate_args(validate, args, {"seq_length": 8}, strict=True) == (
        args,
        {"seq_length": 8},
        True,
    )
    assert ran == ["first", "last", "upstream"]


def test_the_ledger_names_every_check_of_the_arguments() -> None:
    (patch,) = (
        one
        for one in registry.patches
        if one.target == "megatron.training.arguments:validate_args"
        and one.origin.startswith(arguments.__name__)
    )
    for check in arguments.CHECKS:
        assert check.name in patch.why
        assert check.why in patch.why
        assert not check.until or f"{check.name}: {check.until}" in patch.until


def test_moving_activations_is_hidden_from_the_upstream_that_knows_it(monkeypatch) -> None:
    """Before 0.16 the flag is ours, and our check, which runs where upstream's does, has to see it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = argparse.Namespace(fine_grained_activation_offloading=True)
    with activation_offloading.unseen_by_upstream(args):
        assert not args.fine_grained_activation_offloading
    assert args.fine_grained_activation_offloading
    monkeypatch.delattr(TransformerConfig, "fine_grained_activation_offloading")
    with activation_offloading.unseen_by_upstream(args):
        assert args.fine_grained_activation_offloading
