"""The flags that move what a step needs out of the device's memory: where they have no place."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.options import memory_flags


@pytest.mark.parametrize(
    ("device", "others", "said"),
    [
        ("cpu", {}, "--swap-optimizer requires an Ascend NPU, but the device is cpu"),
        ("cuda", {}, "--swap-optimizer requires an Ascend NPU, but the device is cuda"),
        ("npu", {"optimizer": "sgd"}, "--swap-optimizer requires --optimizer adam, but got --optimizer sgd"),
        ("npu", {"reuse_fp32_param": True}, "--swap-optimizer cannot be used with --reuse-fp32-param"),
        ("npu", {"use_precision_aware_optimizer": True}, "with --use-precision-aware-optimizer"),
        ("npu", {"optimizer_cpu_offload": True}, "with --optimizer-cpu-offload"),
        ("npu", {"use_torch_fsdp2": True}, "with FSDP"),
        ("npu", {"fully_sharded": "megatron"}, "with FSDP"),
        ("npu", {}, None),
        ("cpu", {"swap_optimizer": False}, None),
    ],
)
def test_swap_optimizer_is_refused_by_name(device, others, said, monkeypatch):
    monkeypatch.setattr(devices, "current", lambda: Namespace(name=device))
    args = Namespace(**({"swap_optimizer": True} | others))
    if said is None:
        memory_flags.check_swap_optimizer(args)
        return
    with pytest.raises(UsageError, match=said):
        memory_flags.check_swap_optimizer(args)


def test_another_adam_is_refused():
    with pytest.raises(UsageError, match=r"--swap-optimizer requires .* but the Adam from collections"):
        memory_flags.refuse_foreign_adam(__import__("collections").OrderedDict, object())


OFFLOADING = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn"],
    "recompute_granularity": None,
}


@pytest.mark.parametrize(
    ("device", "others", "said"),
    [
        ("cpu", {}, "--fine-grained-activation-offloading requires a device .* on the cpu device"),
        (
            "npu",
            {"offload_modules": ["core_atn"]},
            "--offload-modules includes core_atn, but supports only attn_norm",
        ),
        ("npu", {"offload_modules": ["moe_act"]}, "moe_act of experts require megatron-core 0.16"),
        ("npu", {"offload_modules": []}, "offloading requires --offload-modules"),
        ("npu", {"offload_modules": ["attn_proj"]}, "attn_proj requires core_attn"),
        ("npu", {"fine_grained_activation_offloading": False}, "--offload-modules requires"),
        ("npu", {"recompute_granularity": "full"}, "--recompute-granularity full"),
        ("npu", {"recompute_granularity": "selective"}, "core_attn, which is recomputed"),
        ("npu", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, None),
        ("cuda", {}, None),
    ],
)
def test_offloading_is_refused_by_name(device, others, said, monkeypatch):
    monkeypatch.setattr(devices, "current", lambda: Namespace(name=device, is_host=device == "cpu"))
    args = Namespace(**(OFFLOADING | others))
    if said is None:
        memory_flags.check_activation_offloading(args)
        return
    with pytest.raises(UsageError, match=said):
        memory_flags.check_activation_offloading(args)


@pytest.mark.parametrize(("asked", "modules"), [(True, []), (False, ["core_attn"])])
def test_moving_nothing_is_refused(asked, modules):
    with pytest.raises(UsageError, match=r"offloading and --offload-modules must be .* only one of them"):
        memory_flags.refuse_moving_nothing(
            Namespace(
                **(
                    OFFLOADING
                    | {
                        "fine_grained_activation_offloading": asked,
                        "offload_modules": modules,
                    }
                )
            )
        )
    memory_flags.refuse_moving_nothing(Namespace(**OFFLOADING))
    memory_flags.refuse_moving_nothing(Namespace())
