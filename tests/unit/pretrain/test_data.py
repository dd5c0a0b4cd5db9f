"""Which sample goes to which rank, and when; what --data-path means."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.data import sources
from megatron_npu.pretrain.data.datasets import ResumableBatchSampler
from megatron_npu.pretrain.data.epochs import Passes, RoundAndRound
from megatron_npu.pretrain.data.sources import blend, tell_of_repeated

sizes = st.integers(1, 4)


def taken(number, total, **kwargs):
    return list(islice(ResumableBatchSampler(RoundAndRound(total), **kwargs), number))


@given(micro=sizes, ranks=sizes, steps=st.integers(1, 5))
def test_all_ranks_together_take_each_sample_once_in_order(micro, ranks, steps):
    per_rank = [
        taken(steps, total=10_000, consumed=0, micro_batch=micro, rank=rank, size=ranks)
        for rank in range(ranks)
    ]
    order = [number for step in zip(*per_rank, strict=True) for batch in step for number in batch]
    assert order == list(range(micro * ranks * steps))


@given(micro=sizes, ranks=sizes, before=st.integers(0, 5), after=st.integers(1, 5))
def test_a_resumed_rank_goes_on_where_it_stopped(micro, ranks, before, after):
    common = {"total": 10_000, "micro_batch": micro, "rank": ranks - 1, "size": ranks}
    whole = taken(before + after, consumed=0, **common)
    assert taken(after, consumed=before * micro * ranks, **common) == whole[before:]


def test_after_the_last_sample_comes_the_first():
    assert taken(3, total=3, consumed=2, micro_batch=2, rank=0, size=1) == [[2, 0], [1, 2], [0, 1]]


@given(samples=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), first=st.integers(0, 3))
def test_an_epoch_has_each_sample_once_wherever_it_is_begun(samples, seed, first):
    order = Passes(samples, seed)
    epoch = [order(number) for number in range(first * samples, (first + 1) * samples)]
    assert sorted(epoch) == list(range(samples))
    middle = first * samples + samples // 2
    assert [Passes(samples, seed)(number) for number in range(middle, middle + 1)] == epoch[samples // 2 :][
        :1
    ]


def test_epochs_have_orders_of_their_own():
    order = Passes(100, seed=1234)
    first, second, third = ([order(100 * epoch + n) for n in range(100)] for epoch in range(3))
    assert first == list(range(100))  # that of the dataset, which is shuffled
    assert second not in (first, third)
    assert [Passes(100, seed=4321)(100 + n) for n in range(100)] != second


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], (None, ["a"])),
        (["a", "b"], (None, ["a", "b"])),
        (["0.7", "a", "3", "b"], ([0.7, 3.0], ["a", "b"])),
    ],
)
def test_blend(words, expected):
    assert blend(words) == expected


@pytest.mark.parametrize("words", [["1", "a", "b"], ["1", "a", "b", "c"], ["0", "a"], ["-1", "a"]])
def test_a_broken_blend_is_refused(words):
    for flag in ("--data-path", "--valid-data-path"):
        with pytest.raises(UsageError, match=f"^{flag} "):
            blend(words, flag)


def test_a_dataset_that_a_blend_has_twice_is_said(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin").touch()
    (tmp_path / "c.bin").symlink_to(tmp_path / "a.bin")
    tell_of_repeated([f"{tmp_path}/a", f"{tmp_path}/b"])
    assert capsys.readouterr().err == ""
    for again in ("a", "c", "../" + tmp_path.name + "/a"):
        tell_of_repeated([f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/{again}"], "--valid-data-path")
        assert f"--valid-data-path names {tmp_path}/a more than once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "read"),
    [("969, 30, 1", "969, 30, 1"), ("1e3,1000,0", "1000.000000000000,1000.000000000000,0.000000000000")],
)
def test_a_split_is_handed_on_in_digits_and_dots(text, read) -> None:
    assert sources.split_text(text) == read


@pytest.mark.parametrize("weight", ["nan", "inf", "0", "-1"])
def test_weights_of_a_blend_are_finite_and_above_0(weight) -> None:
    with pytest.raises(UsageError, match="a positive weight before each of them"):
        sources.blend([weight, "one", "1e-6", "other"])
    assert sources.blend(["1e-6", "one", "0.999999", "other"]) == ([1e-6, 0.999999], ["one", "other"])
