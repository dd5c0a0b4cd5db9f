"""How the next token is chosen."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling import choice
from megatron_npu.generation.sampling.options import Options

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.25, 0.15]))


def drawn(number: int = 400, **options) -> torch.Tensor:
    """Return how often each token comes, as parts of one: rows of a batch, each with a draw of its own."""
    draws = torch.rand(number, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = choice.choose(LOGITS.expand(number, -1), Options(**options), draws)
    return torch.bincount(tokens, minlength=4) / number


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3}])
def test_the_likeliest(greedy):
    assert drawn(**greedy, number=20).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_probabilities():
    torch.testing.assert_close(drawn(), LOGITS.exp(), atol=0.08, rtol=0)


def test_limits():
    assert drawn(top_k=2)[[0, 3]].sum() == 0
    assert drawn(top_p=0.7)[[0, 3]].sum() == 0  # 0.5 alone is too little, 0.5 + 0.25 enough
    torch.testing.assert_close(drawn(top_k=2)[1], torch.tensor(2 / 3), atol=0.08, rtol=0)
    assert drawn(top_k=3, top_p=0.5)[[0, 2, 3]].sum() == 0  # of what is left the likeliest has 0.56
    assert drawn(top_k=99).count_nonzero() == 4  # more than there are


def test_temperature_sharpens():
    assert drawn(temperature=0.2)[1] > 0.9


@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.7}])
def test_the_smallest_temperature_takes_the_likeliest(limits):
    """Logits that it divides are too large for any number."""
    assert drawn(temperature=5e-324, number=20, **limits).tolist() == [0, 1, 0, 0]


def test_top_p_of_a_large_flat_vocabulary_needs_more_than_the_likeliest_few():
    logits = torch.zeros(1, 5000)
    last = choice.choose(logits, Options(top_p=0.9), torch.tensor([0.9999999], dtype=torch.float64))
    assert 4400 < int(last) < 4501


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.8}])
def test_the_largest_draw_stays_inside(options):
    almost = torch.tensor([1 - 2**-53], dtype=torch.float64)
    token = choice.choose(LOGITS[None], Options(**options), almost)
    assert drawn(**options)[token] > 0


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 0.0}])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_is_told_and_its_neighbours_are_drawn(options, wrong):
    logits = LOGITS.repeat(2, 1)
    logits[0, 2] = wrong
    tokens = choice.choose(logits, Options(**options), torch.zeros(2, dtype=torch.float64))
    assert int(tokens[0]) == choice.NO_NUMBER
    assert int(tokens[1]) >= 0


def test_log_probabilities():
    (found,) = choice.log_probabilities(LOGITS[None], torch.tensor([3]), 2).tolist()
    assert found == pytest.approx([math.log(0.15), 1, 2, math.log(0.5), math.log(0.25)])


@pytest.mark.parametrize(
    "bad",
    [{"num_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"seed": -1}, {"longest": 1}],
)
def test_numbers_out_of_range_are_refused(bad):
    flag = {"longest": "out-seq-length"}.get(next(iter(bad)), next(iter(bad)).replace("_", "-"))
    with pytest.raises(UsageError, match=f"--{flag} "):
        Options(**bad)
