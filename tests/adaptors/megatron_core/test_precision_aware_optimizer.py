"""--reuse-fp32-param and --use-precision-aware-optimizer of the stock scripts, with our Adam."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_npu.adaptors.megatron_core.options import argument_checks
from megatron_npu.base.errors import UsageError
from megatron_npu.options import memory_flags
from tests.adaptors.megatron_core.conftest import make_ddp
from tests.conftest import checkout
from tests.support.stock_core import losses, norms, pretrain

FLAGS = "--bf16 --use-distributed-optimizer --eval-iters 0 --no-gradient-accumulation-fusion".split()


def test_stock_script_reads_the_plain_optimizers_checkpoint_and_goes_on_to_the_bit(tmp_path):
    """Six iterations at once, and three of them with remainders, from the checkpoint of the third."""
    pytest.importorskip("megatron.core")
    tree = checkout("megatron_core", "0.16.1")
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "3"]
    whole = pretrain(tree, tmp_path, *FLAGS, *saved)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = pretrain(tree, tmp_path, *FLAGS, "--reuse-fp32-param", "--load", str(tmp_path / "saved"))
    # the second loss after a resume is printed as the mean of two (0.16)
    assert losses(resumed)[::2] == losses(whole)[3::2]
    assert norms(resumed) == norms(whole)[3:]


def test_upstreams_configuration_takes_our_adam():
    config = pytest.importorskip("megatron.core.optimizer.optimizer_config").OptimizerConfig
    made = config(
        optimizer="adam", bf16=True, use_distributed_optimizer=True, use_precision_aware_optimizer=True,
        exp_avg_dtype=torch.bfloat16,
    )  # fmt: skip
    assert not made.store_param_remainders  # upstream's own, for TransformerEngine
    with pytest.raises(
        UsageError,
        match=r"--exp-avg-dtype fp8 requires TransformerEngine, .* only fp32, bf16",
    ):
        config(
            optimizer="adam", use_distributed_optimizer=True, use_precision_aware_optimizer=True,
            exp_avg_dtype=torch.uint8,
        )  # fmt: skip
    with pytest.raises(ImportError):  # what stood in for it is gone again
        __import__("transformer_engine")


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("asked", [True, False])
def test_a_copy_of_the_configuration_keeps_remainders(asked):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=0.1, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
        use_precision_aware_optimizer=True, store_param_remainders=asked,
    )  # fmt: skip
    copies = (config, replace(config, lr=0.2), copy.deepcopy(replace(replace(config), lr=0.2)))
    for each in copies:
        model = make_ddp(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        (built,) = get_megatron_optimizer(each, [model]).chained_optimizers
        assert built.optimizer.store_param_remainders is asked


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that operations in the block create."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if torch.is_tensor(each)}
        if torch.is_tensor(result) and result.untyped_storage().data_ptr() not in given:
            self.bytes += result.untyped_storage().nbytes()
        return result


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("changes", [{}, {"exp_avg_dtype": torch.bfloat16}, {"store_param_remainders": True}])
def test_a_resume_does_not_create_the_state_again(changes):
    """Megatron-LM #7288: after the tensors are filled upstream hands the optimizer its own state."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(**{
        "optimizer": "adam", "lr": 0.1, "bf16": True, "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": True, "use_precision_aware_optimizer": True,
        "store_param_remainders": False, **changes,
    })  # fmt: skip
    model = make_ddp(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    (built,) = get_megatron_optimizer(config, [model]).chained_optimizers
    built.init_state_fn(built.optimizer, config)
    state = built.optimizer.state
    before = {(id(key), name): one for key, values in state.items() for name, one in values.items()}
    assert len(before) == 3 * 4
    with Allocated() as ours:
        built.load_state_dict(built.state_dict())
    assert ours.bytes == 0
    assert all(state[key][name] is before[id(key), name] for key in state for name in state[key])
    with Allocated() as torchs:  # which TransformerEngine's begins with, before it creates the state again
        torch.optim.Optimizer.load_state_dict(built.optimizer, built.optimizer.state_dict())
    assert torchs.bytes > 0


PLAIN = {
    "reuse_fp32_param": False, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": False,
    "bf16": True, "main_params_dtype": "fp32", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp32",
    "use_distributed_optimizer": True, "ckpt_format": "torch_dist", "save": None, "load": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_distributed_optimizer": False}, "--use-precision-aware-optimizer requires --use-dist"),
        ({"reuse_fp32_param": True, "bf16": False}, "--reuse-fp32-param requires bf16 parameters"),
        ({"reuse_fp32_param": True, "main_params_dtype": "fp16"}, "--reuse-fp32-param requires bf16"),
        ({"use_precision_aware_optimizer": False}, "--exp-avg-dtype bf16 requires --use-prec"),
        (
            {"exp_avg_sq_dtype": "fp8"},
            "--exp-avg-sq-dtype fp8 requires TransformerEngine",
        ),
        ({"ckpt_format": "torch", "load": "x"}, "optimizer cannot be used with --ckpt-format torch,"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        memory_flags.check_precision_aware_optimizer(Namespace(**(PLAIN | changes)))


def test_the_flag_of_ascend_asks_for_upstreams_own():
    args = Namespace(**(PLAIN | {"reuse_fp32_param": True, "use_precision_aware_optimizer": False}))
    argument_checks.check_precision_aware_optimizer(args)
    assert args.use_precision_aware_optimizer
