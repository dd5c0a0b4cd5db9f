"""How likely the tokens of texts are, against logits of one text at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling import scores as scoring
from megatron_npu.generation.sampling.sampler import Sampler
from tests.support.comparison import here
from tests.unit.generation.test_sampler import END, POSITIONS, VOCABULARY, gpt, single_process

__all__ = ["gpt", "single_process"]
pytestmark = pytest.mark.usefixtures("single_process")
TEXTS = [[1, 2, 3, 4], [7], [9, 8, 7, 6, 5, 4], [1, 2, 3, 5], [*range(POSITIONS + 1)]]


@pytest.fixture
def sampler(gpt) -> Sampler:
    return Sampler(gpt, SimpleNamespace(eod=END, vocab_size=VOCABULARY))


def logits_of(gpt, text: list[int]) -> torch.Tensor:
    """Return the logits of the tokens behind the first, [s, vocabulary], of the model itself."""
    tokens = torch.tensor([text[:-1]], device=here())
    gpt.eval()
    with torch.no_grad():
        return gpt(tokens, torch.arange(tokens.size(1), device=here())[None], None)[0, :, :VOCABULARY].cpu()


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_each_token_has_the_probability_that_the_model_gives_it(sampler, gpt, batch):
    found = sampler.score(TEXTS, alternatives=3, batch=batch)
    assert found[1] == scoring.Score()
    for text, score in zip(TEXTS, found, strict=True):
        if len(text) == 1:
            continue
        expected = logits_of(gpt, text).log_softmax(-1)
        own = expected.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        assert score.logprobs == pytest.approx(own.tolist(), abs=1e-4)
        assert score.greedy == (expected.argmax(-1) == torch.tensor(text[1:])).tolist()
        for some, values in zip(score.alternatives, expected, strict=True):
            assert [*some.values()] == pytest.approx(values.topk(3).values.tolist(), abs=1e-4)
            assert next(iter(some)) == int(values.argmax())


def test_tokens_before_the_first_that_is_asked_for_are_read_and_not_told(sampler):
    whole = sampler.score(TEXTS)
    firsts = [3, 1, 2, 1, POSITIONS]
    for score, first, all_of_it in zip(sampler.score(TEXTS, firsts), firsts, whole, strict=True):
        assert score.first == first
        assert score.logprobs == pytest.approx(all_of_it.logprobs[first - 1 :], abs=1e-5)


def test_texts_that_differ_in_their_last_token_are_read_once(sampler, monkeypatch):
    read = []
    original = scoring.whole_logits
    monkeypatch.setattr(
        scoring,
        "whole_logits",
        lambda chunks, tokens: read.append(tokens.tolist()) or original(chunks, tokens),
    )
    answers = [[1, 2, 3, answer] for answer in (4, 5, 6)]
    together = sampler.score([*answers, [1, 2, 3, 4]], [3, 3, 3, 2])
    assert read == [[[1, 2, 3]]]
    assert together[3].logprobs[1] == together[0].logprobs[0]
    assert [sampler.score([text], [3])[0] for text in answers] == together[:3], "to the bit"
    assert len({score.logprobs[0] for score in together[:3]}) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [([], "empty"), ([1, VOCABULARY], "ids from 1 to 50"), ([1] * (POSITIONS + 2), "at most 25")],
)
def test_texts_that_do_not_fit_are_refused(sampler, text, told):
    with pytest.raises(UsageError, match=told):
        sampler.score([[1, 2], text])


def test_logits_that_are_no_numbers_are_refused(sampler, gpt, monkeypatch):
    monkeypatch.setattr(
        scoring, "whole_logits", lambda chunks, tokens: torch.full((*tokens.shape, 64), torch.nan)
    )
    with pytest.raises(UsageError, match="NaN or infinite"):
        sampler.score([[1, 2]])
