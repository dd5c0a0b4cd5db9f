"""A schedule that is not the checkpoint's, refused with the flags that decide."""

from __future__ import annotations

import pytest

from megatron_npu.adaptors.shared import resumed_schedule
from megatron_npu.base.errors import UsageError


def upstream(self: object, cls_value: float, sd_value: float, name: str) -> float:
    assert cls_value == sd_value, f"class input value {cls_value} and checkpointvalue {sd_value}"
    return sd_value


def test_an_equal_schedule_is_upstreams_answer() -> None:
    assert resumed_schedule.refuse_in_one_line(upstream, None, 3.0, 3.0, "learning rate") == 3.0


def test_another_is_refused_with_both_values_and_both_flags() -> None:
    with pytest.raises(UsageError) as caught:
        resumed_schedule.refuse_in_one_line(upstream, None, 320, 160, "total number of iterations")
    said = str(caught.value)
    assert "total number of iterations is 320 on the command line but 160 in the checkpoint" in said
    assert "--override-opt_param-scheduler" in said
    assert "--use-checkpoint-opt_param-scheduler" in said
