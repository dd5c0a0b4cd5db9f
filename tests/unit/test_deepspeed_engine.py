"""What upstream's training loop finds at DeepSpeed's engine, without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_npu.adaptors.deepspeed import deepspeed_engine, deepspeed_half, flags_and_runs


def test_the_loss_scale_is_where_upstream_reads_it():
    class WithoutZero:
        """As DeepSpeed's FP16_Optimizer."""

        def __init__(self):
            self.loss_scale_config = SimpleNamespace(cur_scale=8.0)

    optimizer = WithoutZero()
    deepspeed_engine.show_loss_scale(optimizer)
    optimizer.loss_scale_config.cur_scale = 4.0
    assert optimizer.cur_scale == 4.0


def test_one_that_shows_it_and_none_stay_as_they_are():
    shown = SimpleNamespace(cur_scale=2.0, loss_scale_config=SimpleNamespace(cur_scale=8.0))
    deepspeed_engine.show_loss_scale(shown)
    assert shown.cur_scale == 2.0
    deepspeed_engine.show_loss_scale(None)


@pytest.mark.parametrize(
    ("half", "own", "times"), [(True, None, 8.0), (False, None, None), (True, "torch's", None)]
)
def test_a_loss_is_multiplied_by_what_gradients_are_divided_by(half, own, times):
    scale = SimpleNamespace(cur_scale=4.0, use_grad_scaling=half)
    steps = []
    optimizer = SimpleNamespace(loss_scale_config=scale, step=lambda: steps.append(scale.cur_scale))
    engine = SimpleNamespace(optimizer=optimizer, torch_autocast_z0_gradscaler=own)
    deepspeed_half.multiply_the_loss(engine)
    scaler = engine.torch_autocast_z0_gradscaler
    if times is None:
        assert scaler is own
        return
    scale.cur_scale = times  # as it adapts
    scaled = scaler.scale(torch.tensor(2.0, dtype=torch.float16))
    assert (scaled.dtype, scaled.item()) == (torch.float32, 2 * times)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert steps == [times]


def test_an_optimizer_of_zero_scales_by_itself():
    engine = SimpleNamespace(optimizer=SimpleNamespace(), torch_autocast_z0_gradscaler=None)
    deepspeed_half.multiply_the_loss(engine)
    assert engine.torch_autocast_z0_gradscaler is None


@pytest.mark.parametrize(("words", "times"), [({}, 0), ({"load_optimizer_states": False}, 1)])
def test_weights_that_are_loaded_alone_are_stepped_from(words, times):
    copied = []

    def load_checkpoint(load_dir, load_module_strict=True, load_optimizer_states=True):
        copied.append("read")
        return load_dir, {}

    def refresh():
        assert copied[0] == "read"
        copied.append("copied")

    optimizer = SimpleNamespace(loss_scale_config=None, refresh_fp32_params=refresh)
    engine = SimpleNamespace(optimizer=optimizer, load_checkpoint=load_checkpoint)
    deepspeed_half.step_from_loaded_weights(engine)
    assert engine.load_checkpoint("folder", **words) == ("folder", {})
    assert copied.count("copied") == times


def test_an_engine_of_zero_or_of_fp32_loads_as_before():
    engine = SimpleNamespace(optimizer=SimpleNamespace(), load_checkpoint="its own")
    deepspeed_half.step_from_loaded_weights(engine)
    assert engine.load_checkpoint == "its own"


@pytest.mark.parametrize("own", [False, True], ids=["the class's", "its own"])
def test_an_engine_saves_as_before_when_it_was_given_the_name_of_a_save(tmp_path, own) -> None:
    """A program may have put a method of its own on the engine: it is called with the name, and stays."""
    calls = []

    class Engine:
        global_steps = 7

        def save_checkpoint(self, *args, **kwargs):
            calls.append(kwargs)

    engine = Engine()
    if own:
        engine.save_checkpoint = lambda *args, **kwargs: calls.append({"own": True, **kwargs})
    before = dict(vars(engine))
    with flags_and_runs._tagged_afterwards(engine, str(tmp_path)) as tag:
        engine.save_checkpoint(str(tmp_path))
    assert calls == [{**({"own": True} if own else {}), "tag": tag, "save_latest": False}]
    assert vars(engine) == before
    assert (tmp_path / "latest").read_text() == "global_step7"
