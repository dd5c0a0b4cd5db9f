"""Values in ``--model_args`` and in a task's ``generation_kwargs`` that are not what their keys need."""

from __future__ import annotations

import math

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation import model_args
from megatron_npu.evaluation.gen_kwargs import Wish

_NO_COUNTS = ["x", "", "-1", -1, "nan", math.nan, math.inf, 2.5, True, None, [2], "1" * 30, 10**30, "\u0663"]


@pytest.mark.parametrize("value", _NO_COUNTS, ids=repr)
def test_what_is_no_count_is_refused_by_name(value):
    with pytest.raises(UsageError, match=r"max_length in --model_args must be a whole number of at least 1"):
        model_args.count("max_length", value)


def test_counts_as_lm_eval_may_give_them():
    assert [model_args.count("max_length", value) for value in (7, "7", 7.0)] == [7, 7, 7]
    assert model_args.count("top_k", 0, least=0) == 0
    with pytest.raises(UsageError, match="at least 1, but it is 0"):
        model_args.count("max_length", 0)


def test_switches():
    assert [model_args.switch("bf16", value) for value in (True, False, 1, 0)] == [True, False, True, False]
    for value in ("x", "yes", 2, None):
        with pytest.raises(UsageError, match="bf16 in --model_args must be true or false"):
            model_args.switch("bf16", value)


@pytest.mark.parametrize(
    ("load", "unknown", "device", "told"),
    [
        ("", {}, None, "--model_args has no checkpoint. Add --model_args load=DIR"),
        (None, {}, None, "--model_args has no checkpoint"),
        ("saved", {"evil": 1}, None, "unknown key evil in --model_args"),
        ("saved", {}, "evil;x", "--device must be cpu, the device of this process, but got evil;x"),
        ("saved", {}, "xpu", "--device must be cpu"),
    ],
)
def test_keys_and_device(load, unknown, device, told, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    with pytest.raises(UsageError) as raised:
        model_args.require_known(load, unknown, device)
    assert told in str(raised.value)
    model_args.require_known("saved", {}, "cuda:0")


def test_what_is_an_option_of_its_own_is_no_key():
    with pytest.raises(UsageError, match=r"batch_size is not a key of --model_args. Use --batch_size 8"):
        model_args.require_once({"load": "saved", "batch_size": 8}, {"batch_size": 1, "device": None})
    model_args.require_once({"load": "saved", "device": "cpu"}, {"batch_size": 1, "device": None})


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": "x"},
        {"temperature": math.nan},
        {"temperature": -1},
        {"top_p": "x"},
        {"top_p": math.inf},
        {"top_k": "x"},
        {"top_k": -1},
        {"max_gen_toks": "x"},
        {"max_gen_toks": 0},
        {"max_gen_toks": -3},
    ],
    ids=str,
)
def test_numbers_of_a_task_that_are_none_are_refused_by_name(wanted):
    with pytest.raises(UsageError, match=f"{next(iter(wanted))} in generation_kwargs must be a "):
        Wish.of(wanted, 16)
