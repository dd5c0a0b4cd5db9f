"""What upstream's training loop finds at DeepSpeed's engine, without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_npu.adaptors.shared import deepspeed_engine


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
