"""The flags of a mixture of experts: patterns of layers, what follows, what cannot be."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from megatron_npu.base.arg_parser import Unfit
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import arguments, derive, validation
from megatron_npu.pretrain.flags.checks import experts
from megatron_npu.pretrain.flags.expert_flags import layer_frequency
from megatron_npu.pretrain.flags.plan_parts import ExpertFlags, ModelSizes
from megatron_npu.pretrain.report import flops
from megatron_npu.pretrain.run.losses import expert_losses
from megatron_npu.pretrain.run.losses.expert_losses import ExpertLosses

EXPERTS = "--num-experts 4 --disable-bias-linear"


@pytest.fixture
def check(flags, monkeypatch):
    """Return a function: flags to add, number of processes -> the checked flags."""

    def checked(*changes: str, processes: int = 1) -> Namespace:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        return validation.check(arguments.parse(flags(*changes)))

    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return checked


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("2", 2),
        ("[1,0]", [1, 0]),
        ("([0]*1+[1]*3)*2", [0, 1, 1, 1, 0, 1, 1, 1]),
        ("2*[1]", [1, 1]),
    ],
)
def test_patterns_of_layers(text, meaning):
    assert layer_frequency(text) == meaning


@pytest.mark.parametrize(
    "text", ["0", "-1", "[2]", "[1]*[1]", "2*3", "[1]*10**9", "[1]*99999", "f()", "[x]", "(" * 999, "[1][0]"]
)
def test_what_is_no_pattern(text):
    with pytest.raises(Unfit):
        layer_frequency(text)


def test_what_follows(check):
    args = check(*EXPERTS.split(), "--expert-model-parallel-size", "2", processes=4)
    assert (args.moe_ffn_hidden_size, args.expert_tensor_parallel_size) == (128, 1)
    assert not args.use_cpu_initialization  # which would draw the same experts on each rank
    assert derive.expert_layers(args) == [True, True]
    dense = check()
    assert (dense.moe_ffn_hidden_size, expert_losses.names(ExpertFlags.of(dense))) == (None, [])


@pytest.mark.parametrize(
    ("changes", "processes", "named"),
    [
        ("--moe-router-topk 1", 1, "--moe-router-topk requires --num-experts"),
        ("--expert-model-parallel-size 2", 2, "--expert-model-parallel-size requires --num-experts"),
        (f"{EXPERTS} --moe-router-topk 5", 1, "at most --num-experts 4"),
        (f"{EXPERTS} --moe-router-topk 1", 1, "--moe-router-pre-softmax"),
        (f"{EXPERTS} --moe-layer-freq [1]", 1, "2 layers (--num-layers), but it describes 1"),
        (f"{EXPERTS} --moe-layer-freq [0,0]", 1, "at least one layer"),
        (f"{EXPERTS} --moe-layer-freq x", 1, "--moe-layer-freq must be a number"),
        (f"{EXPERTS} --moe-router-load-balancing-type what", 1, "but got 'what'"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", 1, "sinkhorn"),
        (
            f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss",
            1,
            "have one --moe-aux-loss-coeff",
        ),
        (f"{EXPERTS} --moe-router-enable-expert-bias", 1, "sigmoid"),
        (f"{EXPERTS} --moe-router-num-groups 2", 1, "must be passed together"),
        (f"{EXPERTS} --moe-shared-expert-gate", 1, "--moe-shared-expert-intermediate-size"),
        (f"{EXPERTS} --moe-pad-expert-input-to-capacity", 1, "--moe-expert-capacity-factor"),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", 1, "DeepEP"),
        (
            f"{EXPERTS} --moe-z-loss-coeff -1",
            1,
            "--moe-z-loss-coeff must be a non-negative number, but got -1",
        ),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 8", 1, "--disable-bias-linear"),
        (f"{EXPERTS} --tensor-model-parallel-size 2", 2, "--sequence-parallel"),
        (
            f"{EXPERTS} --expert-model-parallel-size 3",
            3,
            "--num-experts must be a multiple of --expert-model-parallel-size = 3",
        ),
        (f"{EXPERTS} --expert-model-parallel-size 4", 2, "the number of processes must be a multiple of"),
        (f"{EXPERTS} --expert-model-parallel-size 2 --use-cpu-initialization", 2, "--use-cpu-init"),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            2,
            "does not sum the experts' gradients",
        ),
    ],
)
def test_what_cannot_be(check, changes, processes, named):
    with pytest.raises(UsageError) as caught:
        check(*changes.split(), processes=processes)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("version", "changes", "since"),
    [
        ("0.12.1", "--moe-router-force-load-balancing", "0.13"),
        ("0.13.1", "--moe-router-load-balancing-type global_aux_loss", "0.14"),
        (
            "0.13.1",
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 1",
            "0.14",
        ),
        ("0.14.0", "--num-experts 4", "0.15"),
        ("0.16.1", "--moe-grouped-gemm", "--bf16"),
    ],
)
def test_what_a_version_does_not_have(flags, version, changes, since):
    experts_alone = "--num-experts 4" if changes == "--num-experts 4" else EXPERTS
    args = arguments.parse(flags(*experts_alone.split(), *changes.split()))
    args.megatron_version, args.ffn_hidden_size = version, 128
    with pytest.raises(UsageError, match=rf"megatron-core {version}") as caught:
        experts.check(args)
    assert since in str(caught.value)


def test_flops_count_the_experts_of_a_token(check):
    dense = check("--disable-bias-linear", "--ffn-hidden-size", "3")
    mixed = check(
        *EXPERTS.split(),
        *"--ffn-hidden-size 3 --moe-ffn-hidden-size 5 --moe-layer-freq [0,1]".split(),
        *"--moe-shared-expert-intermediate-size 7".split(),
    )
    more = (2 * 5 + 7 - 3) * 2 * 32  # inner sizes more, two matrices, hidden size
    assert flops.of_step(ModelSizes.of(mixed)) - flops.of_step(ModelSizes.of(dense)) == 6 * more * 32 * 4


@pytest.mark.parametrize("places", [2, 3])
def test_layers_of_prediction_have_balancing_losses_too(check, monkeypatch, places):
    """megatron-core counts them behind the layers of the model; 0.12 adds their losses to the others'."""
    mtp = "--mtp-num-layers 1 --position-embedding-type rope".split()
    flags = ExpertFlags.of(check(*EXPERTS.split(), *mtp))
    assert flags.layers == (True, True, True)
    kept = {"z_loss": {"values": torch.ones(places), "reduce_group": None}}
    monkeypatch.setattr(expert_losses, "_tracker", lambda: kept)
    row = torch.zeros(len(flags.layers))
    expert_losses._take_into(row, "z_loss")
    assert row.sum() == places
    assert not kept["z_loss"]["values"].any()


def test_a_second_run_of_a_process_begins_anew(check, monkeypatch):
    """megatron-core keeps the losses in a table of the process, with as many layers as the first run had."""
    kept = {"load_balancing_loss": {"values": [1.0, 2.0]}}
    monkeypatch.setattr(expert_losses, "_tracker", lambda: kept)
    ExpertLosses.of(ExpertFlags.of(check(*EXPERTS.split()))).forget()
    assert kept
    balanced = check(*EXPERTS.split(), "--moe-aux-loss-coeff", "0.1")
    ExpertLosses.of(ExpertFlags.of(balanced)).forget()
    assert not kept
