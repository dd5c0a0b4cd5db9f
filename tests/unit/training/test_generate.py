"""How the next token is chosen."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.errors import UsageError
from megatron_npu.evaluation.generate import generate, sample_token
from megatron_npu.training.tokenizers import NullTokenizer

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.25, 0.15]))


def drawn(temperature=1.0, top_k=0, top_p=0.0, number=400) -> torch.Tensor:
    """Return how often each token comes, as parts of one."""
    generator = torch.Generator().manual_seed(0)
    tokens = [sample_token(LOGITS, temperature, top_k, top_p, generator) for _ in range(number)]
    return torch.bincount(torch.tensor(tokens), minlength=4) / number


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3}])
def test_the_likeliest(greedy):
    assert drawn(**greedy, number=20).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_probabilities():
    torch.testing.assert_close(drawn(), LOGITS.exp(), atol=0.08, rtol=0)


def test_limits():
    assert drawn(top_k=2)[[0, 3]].sum() == 0
    assert drawn(top_p=0.7)[[0, 3]].sum() == 0  # 0.5 alone is too little, 0.5 + 0.25 enough
    torch.testing.assert_close(drawn(top_k=2)[1], torch.tensor(2 / 3), atol=0.08, rtol=0)


def test_temperature_sharpens():
    assert drawn(temperature=0.2)[1] > 0.9


@pytest.mark.parametrize("bad", [{"num_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}])
def test_numbers_out_of_range_are_refused(bad, tmp_path):
    with pytest.raises(UsageError, match=next(iter(bad)).replace("_", "-")):
        generate(str(tmp_path), "1 2", **bad)


def test_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint there"):
        generate(str(tmp_path), "1 2")


def test_null_tokenizer():
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.decode(tokenizer.encode("3 10 0")) == "3 10 0"
    with pytest.raises(UsageError, match="numbers from 0 to 10"):
        tokenizer.encode("3 11")
