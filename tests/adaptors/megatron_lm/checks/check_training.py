"""Arguments, start, optimizers, schedules and checkpoints."""

from __future__ import annotations

import os
import pickle
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_npu import devices
from megatron_npu.adaptors.shared import mixed_precision as shared_precision
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.options.attention_flags import AttentionFlags
from tests.support import stock_lm
from tests.support.comparison import here, leaf
from tests.support.payload import Runs

DATA = Path(os.environ["CHECK_DATA"])


# -- arguments --------------------------------------------------------------------------------------


@pytest.fixture
def parse(monkeypatch):
    from megatron.arguments import parse_args

    def with_flags(*flags):
        monkeypatch.setattr(sys, "argv", ["check", *stock_lm.flags(DATA), *flags])
        return parse_args()

    return with_flags


@pytest.mark.parametrize("spelling", ["tockens", "tokens"])
def check_attention_flags(parse, spelling):
    args = parse(f"--pre-{spelling}=2048", f"--next-{spelling}", "0", "--shape-order=BSH")
    assert AttentionFlags.from_args(args) == AttentionFlags(2048, 0, "BSH")
    assert AttentionFlags.from_args(parse()).window == (None, None)


@pytest.mark.parametrize("flag", ["--pre-tockens=-1", "--next-tockens=many", "--shape-order=HSB"])
def check_bad_flags(parse, flag, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(flag)
    assert stop.value.code == 2
    assert flag.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def check_local_rank(parse, flag):
    assert parse(flag).local_rank == 1


def check_decoder_layers_and_connections(parse, monkeypatch):
    from megatron.arguments import validate_args

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert validate_args(parse()).decoder_num_layers == stock_lm.LAYERS
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


# -- start ------------------------------------------------------------------------------------------


def check_start_compiles_nothing():
    """No kernels, no helpers, no warm-up; the functions taken by value elsewhere are ours too."""
    import megatron.training
    from megatron import fused_kernels
    from megatron.data import helpers
    from megatron.initialize import set_jit_fusion_options

    assert fused_kernels.load(None) is None
    assert megatron.training.set_jit_fusion_options is set_jit_fusion_options
    assert set_jit_fusion_options.__module__.endswith("shared.start")
    assert helpers.__name__ == "megatron_npu.standins.datasets.dataset_helpers"


def check_index_files(tmp_path):
    """Built once, read without pickle, never half-written."""
    from megatron.data import gpt_dataset

    sizes = np.array([5, 0, 17, 9], np.int32)
    arguments = ("train", str(tmp_path / "text"), np.arange(4, dtype=np.int32), sizes, 8, 6, 3)
    built = gpt_dataset._build_index_mappings(*arguments)
    again = gpt_dataset._build_index_mappings(*arguments)
    for left, right in zip(built, again, strict=True):
        np.testing.assert_array_equal(left, right)
    expected = gpt_dataset._build_sample_idx(sizes, built[0], 6, len(built[0]) // 4, int(sizes.sum()))
    np.testing.assert_array_equal(built[1], expected)  # upstream's own Python, which nothing there calls
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 3
    assert not any(name.endswith(".partial") for name in files)
    trap = tmp_path / "trapped"
    next(tmp_path.glob("*_doc_idx.npy")).write_bytes(pickle.dumps(Runs(trap)))
    with pytest.raises(UsageError, match=r"contains a pickle that refers to posix\.mkdir"):
        gpt_dataset._build_index_mappings(*arguments)
    assert not trap.exists()


# -- optimizers -------------------------------------------------------------------------------------


def provide_model(pre_process=True, post_process=True):
    from megatron.model import GPTModel

    return GPTModel(parallel_output=True, pre_process=pre_process, post_process=post_process)


@pytest.fixture
def training(args):
    """Return a function: arguments -> model and optimizer of the stock ``setup_model_and_optimizer``."""
    from megatron.model import ModelType
    from megatron.training import setup_model_and_optimizer

    def setup(**changes):
        args(load=None, accumulate_allreduce_grads_in_fp32=True, **changes)
        model, optimizer, _ = setup_model_and_optimizer(provide_model, ModelType.encoder_or_decoder)
        return model, optimizer

    return setup


HALF = {"bf16": True, "params_dtype": torch.bfloat16}


def fill(model, value):
    for parameter in model[0].parameters():
        parameter.main_grad.fill_(value)


@pytest.mark.parametrize(("iteration", "expected"), [(12, 16), (11, 24)])
def check_a_run_that_has_ended_validates_on_the_same_samples(args, iteration, expected):
    """Found by the campaign: started again a few times it would end in StopIteration."""
    from megatron.training import build_train_valid_test_data_iterators

    given = args(
        train_iters=12, eval_interval=6, eval_iters=1, global_batch_size=8, consumed_train_samples=96
    )
    given = args(iteration=iteration, consumed_valid_samples=24, do_train=0, do_valid=0, do_test=0)
    build_train_valid_test_data_iterators(lambda sizes: (None, None, None))
    assert given.consumed_valid_samples == expected


def check_adam_is_ours():
    from megatron.optimizer import Adam

    assert Adam is FusedAdam


@pytest.mark.parametrize("changes", [{}, HALF], ids=["fp32", "bf16"])
def check_distributed_optimizer_shares_memory(training, changes):
    """Its parameter buffers are the gradient buffers, read as parameters; shards are what the model has."""
    model, optimizer = training(use_distributed_optimizer=True, **changes)
    dtype = changes.get("params_dtype", torch.float32)
    for buffers, chunk in zip(optimizer.param_buffers, model, strict=True):
        for kind, buffer in buffers.items():
            gradients = chunk._grad_buffers[kind]
            assert buffer.dtype == dtype
            assert buffer.numel() == gradients.numel_padded
            assert buffer.data_ptr() == gradients.data.data_ptr()
    assert not hasattr(torch.storage.TypedStorage, "_untyped")
    groups = optimizer.model_float16_groups if changes else optimizer.model_fp32_groups
    shards = optimizer.shard_fp32_from_float16_groups if changes else optimizer.shard_fp32_groups
    pairs = [pair for group in zip(groups, shards, strict=True) for pair in zip(*group, strict=True)]
    assert len(pairs) == len(list(model[0].parameters()))
    for parameter, shard in pairs:
        torch.testing.assert_close(shard, parameter.detach().float().flatten())


def check_half_precision_optimizer_keeps_fp32_weights(training):
    model, optimizer = training(**HALF)
    pairs = list(zip(*optimizer._get_model_and_main_params_data_float16(), strict=True))
    assert len(pairs) == len(list(model[0].parameters()))
    for half, main in pairs:
        assert (half.dtype, main.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(half.float(), main)


@pytest.mark.parametrize("flagged", [False, True])
def check_parameters_are_copied_in_one_call(flagged):
    from megatron.optimizer.optimizer import _multi_tensor_copy_this_to_that

    this = [leaf(5, 3).detach(), leaf(7).detach()]
    that = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in this]
    flag = torch.ones(1, dtype=torch.int32, device=here()) if flagged else None
    _multi_tensor_copy_this_to_that(this, that, flag)
    _multi_tensor_copy_this_to_that([], [], None)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(this, that, strict=True))
    assert flag is None or not flag.any()


def fp16_optimizer(training):
    model, optimizer = training(fp16=True, params_dtype=torch.float16, initial_loss_scale=1024.0)
    fill(model, 2048.0)
    optimizer._copy_model_grads_to_main_grads()
    return optimizer


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def check_overflow_is_found(training, bad):
    optimizer = fp16_optimizer(training)
    gradients = optimizer._collect_main_grad_data_for_unscaling()
    if bad is not None:
        gradients[-1].view(-1)[-1] = bad
    assert optimizer._unscale_main_grads_and_check_for_nan() == (bad is not None)
    if bad is None:
        assert all((gradient == 2.0).all() for gradient in gradients)


@pytest.mark.parametrize("flag", [False, True])
def check_overflow_flag_of_the_device(training, monkeypatch, flag):
    """Chips that saturate: their flag alone makes a step be skipped."""
    from megatron.optimizer.optimizer import MixedPrecisionOptimizer

    optimizer = fp16_optimizer(training)
    monkeypatch.setattr(devices.current(), "overflowed", lambda: flag)
    check = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan
    assert shared_precision.heed_overflow_flag(check, optimizer) == flag


@pytest.mark.parametrize("scaled", [False, True])
def check_overflow_flag_is_cleared_once_a_step(training, monkeypatch, scaled):
    cleared = []
    monkeypatch.setattr(devices.current(), "clear_overflow", lambda: cleared.append(1))
    optimizer = fp16_optimizer(training) if scaled else training()[1]
    schedule = partial(shared_precision.clear_overflow_first, lambda *args, **kwargs: (args, kwargs))
    assert schedule("step", "data", "model", optimizer, None, forward_only=False) == (
        ("step", "data", "model", optimizer, None),
        {"forward_only": False},
    )
    assert len(cleared) == scaled


def check_clipping():
    from megatron.optimizer.clip_grads import clip_grad_norm_fp32

    parameters = [
        torch.nn.Parameter(torch.randn(5, 3, device=here())),
        torch.nn.Parameter(torch.randn(7, device=here())),
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()
    norm = clip_grad_norm_fp32(parameters, [parameter.grad for parameter in parameters], 0.5)
    expected = torch.nn.utils.clip_grad_norm_(copies, 0.5)
    assert norm == pytest.approx(expected.item())
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad)


# -- schedules --------------------------------------------------------------------------------------


def check_step_of_the_stock_schedule(training, args, capsys):
    """forward_backward_no_pipelining and backward_step: gradients of micro-batches add up."""
    from megatron import schedules

    model, optimizer = training()
    tokens = torch.randint(250, (2, stock_lm.LENGTH), device=here())
    mask = torch.ones(1, 1, stock_lm.LENGTH, stock_lm.LENGTH, dtype=torch.bool, device=here()).triu(1)

    def step(iterator, chunk):
        output = chunk(
            tokens, torch.arange(stock_lm.LENGTH, device=here()).expand(2, -1), mask, labels=tokens
        )
        return output, lambda losses: (losses.mean(), {"lm loss": losses.mean()})

    run = schedules.get_forward_backward_func()
    assert "megatron_lm 285068c8" in capsys.readouterr().out
    model[0].zero_grad_buffer()
    losses = run(step, None, model, optimizer, None, forward_only=False)
    assert len(losses) == stock_lm.BATCH // 2
    whole = [parameter.main_grad.clone() for parameter in model[0].parameters()]
    model[0].zero_grad_buffer()
    (step(None, model[0])[1](step(None, model[0])[0])[0]).backward()
    for parameter, expected in zip(model[0].parameters(), whole, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(expected, parameter.main_grad, atol=1e-6, rtol=1e-4)
        assert expected.any(), "a gradient that is still waiting"


def check_deallocated_output_still_has_its_graph():
    from megatron.schedules import custom_backward, deallocate_output_tensor

    x = leaf(6)
    output = x * 3
    deallocate_output_tensor(output)
    assert output.numel() == 1
    custom_backward(output, torch.ones(6, device=here()))
    torch.testing.assert_close(x.grad, torch.full((6,), 3.0, device=here()))


# -- checkpoints ------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(training, args, tmp_path):
    """A checkpoint of the stock ``save_checkpoint``: its folder and the file of rank 0."""
    from megatron.checkpointing import save_checkpoint

    model, optimizer = training()
    args(save=str(tmp_path / "saved"))
    former = os.umask(0)  # whatever the user has
    save_checkpoint(3, model, optimizer, None)
    assert os.umask(former) == 0, "the user's umask must come back"
    return tmp_path / "saved", next(tmp_path.glob("saved/iter_0000003/*/model_optim_rng.pt"))


def check_checkpoint_is_private_and_complete(checkpoint):
    folder, file = checkpoint
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o640}
    assert (folder.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o750, 0o750)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert not list(folder.glob("*.partial"))


def check_checkpoint_loads_as_data(checkpoint, monkeypatch):
    from megatron.checkpointing import _load_base_checkpoint

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # even where a user has asked for trust
    content, _, release = _load_base_checkpoint(str(checkpoint[0]), False)
    assert (content["iteration"], release) == (3, False)
    assert content["args"].num_layers == stock_lm.LAYERS
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


@pytest.mark.parametrize("damage", ["malicious", "truncated"])
def check_bad_checkpoint_is_refused(checkpoint, tmp_path, damage):
    """Upstream prints a line and ends with exit code 0."""
    from megatron.checkpointing import _load_base_checkpoint

    folder, file = checkpoint
    trap = tmp_path / "trapped"
    if damage == "malicious":
        torch.save({"model": Runs(trap)}, file)
    else:
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"cannot be read.*source that you do not trust"):
        _load_base_checkpoint(str(folder), False)
    assert not trap.exists()


def check_old_loss_scaler_is_data(checkpoint):
    """NVIDIA's 345M checkpoint of 2020 holds one, under a module name that is gone."""
    import types

    from megatron.checkpointing import _load_base_checkpoint
    from megatron.fp16_deprecated.loss_scaler import DynamicLossScaler

    folder, file = checkpoint
    old = type("DynamicLossScaler", (DynamicLossScaler,), {"__module__": "fp16.loss_scaler"})
    sys.modules["fp16"] = types.ModuleType("fp16")
    sys.modules["fp16.loss_scaler"] = types.ModuleType("fp16.loss_scaler")
    sys.modules["fp16.loss_scaler"].DynamicLossScaler = old
    scaler = old.__new__(old)
    scaler.__dict__["cur_scale"] = 4.0
    torch.save({"optimizer": {"loss_scaler": scaler}}, file)
    del sys.modules["fp16"], sys.modules["fp16.loss_scaler"]
    content, _, _ = _load_base_checkpoint(str(folder), False)
    assert content["optimizer"]["loss_scaler"].cur_scale == 4.0


# -- text generation --------------------------------------------------------------------------------


def check_text_generation_takes_tensors_of_this_device():
    from megatron.text_generation import communication

    communication._is_cuda_contiguous(torch.ones(2, 3, device=here()))
    with pytest.raises(AssertionError):
        communication._is_cuda_contiguous(torch.ones(2, 3, device=here()).t())
    with pytest.raises(AssertionError):
        communication._is_cuda(None)


def check_generation_with_and_without_cache(training, args):
    """Greedy text with cached keys is what a forward over the whole text says, word by word."""
    from megatron.text_generation import generate_and_post_process

    model, _ = training()
    chunk = model[0].module.eval()
    prompts = ["abcdefg", "xyz"]
    texts, _, _, tokens = generate_and_post_process(chunk, prompts, tokens_to_generate=6, top_k_sampling=1)
    assert len(texts) == 2
    with torch.no_grad():
        for prompt, row in zip(prompts, tokens, strict=True):
            known = len(prompt)
            for end in range(known, len(row)):
                ids = torch.tensor([row[:end]], device=here())
                mask = torch.ones(1, 1, end, end, dtype=torch.bool, device=here()).triu(1)
                logits = chunk(ids, torch.arange(end, device=here())[None], mask)
                said = min(logits[0, -1].argmax().item(), stock_lm.END)  # upstream clamps padding words
                assert said == row[end]


def check_whole_tensors_are_sent_where_one_rank_has_all(monkeypatch):
    """One tensor-parallel rank gathers nothing; with two, or as the user says, upstream decides."""
    from megatron import get_args
    from megatron.core import mpu

    from megatron_npu.adaptors.megatron_lm.pipeline_parallel import send_whole_tensors

    def original(tensor, *, cut):
        return tensor, cut, get_args().scatter_gather_tensors_in_pipeline

    monkeypatch.setattr(get_args(), "scatter_gather_tensors_in_pipeline", True)
    assert send_whole_tensors(original, 1, cut=2) == (1, 2, False)
    assert get_args().scatter_gather_tensors_in_pipeline
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: 2)
    assert send_whole_tensors(original, 1, cut=2) == (1, 2, True)
