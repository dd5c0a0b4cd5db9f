"""Texts drawn from a live model in this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sampler
from tests.support.comparison import here
from tests.support.core_models import make_config, single_process

__all__ = ["single_process"]
pytestmark = pytest.mark.usefixtures("single_process")
POSITIONS, VOCABULARY = 24, 50  # the model has 64 ids, of which 14 only pad
END = 49
PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4], [1, 2, 3]]
DRAWN = Options(num_tokens=12, seed=5, top_p=0.95)


@pytest.fixture(scope="module", params=["learned_absolute", "rope"])
def gpt(request, single_process) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(5)
    kind = request.param
    model = GPTModel(make_config(), get_gpt_layer_local_spec(), 64, POSITIONS, position_embedding_type=kind)
    with torch.no_grad():  # far from uniform, so that rounding decides nothing
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.to(here())


@pytest.fixture
def sampler(gpt) -> Sampler:
    return Sampler(gpt, SimpleNamespace(eod=END, vocab_size=VOCABULARY))


def texts(samples) -> list[list[int]]:
    return [sample.ids() for sample in samples]


@pytest.mark.parametrize("options", [DRAWN, Options(num_tokens=12, temperature=0)])
def test_a_text_does_not_depend_on_its_batch(sampler, options):
    together = texts(sampler.sample(PROMPTS, options))
    assert texts(sampler.sample(PROMPTS, options, batch=2)) == together
    for place, prompt in enumerate(PROMPTS):
        shifted = Options(**{**vars(options), "seed": options.seed + place})
        assert texts(sampler.sample([prompt], shifted)) == [together[place]]
    assert (together[0] == together[3]) == options.greedy  # each has draws of its own


def test_a_short_text_may_end_before_a_longer_prompt_is_read(sampler):
    options = Options(num_tokens=1, temperature=0)
    alone = [sampler.sample([prompt], options)[0].ids() for prompt in PROMPTS]
    assert texts(sampler.sample(PROMPTS, options)) == alone


def test_without_the_cache_the_text_is_the_same(sampler):
    again = Options(**{**vars(DRAWN), "recompute": True})
    assert texts(sampler.sample(PROMPTS, again)) == texts(sampler.sample(PROMPTS, DRAWN))


def test_the_model_itself_would_choose_so(sampler, gpt):
    (sample,) = sampler.sample([[1, 2, 3]], Options(num_tokens=8, temperature=0, alternatives=2))
    tokens = torch.tensor([sample.ids()], device=here())
    gpt.eval()
    with torch.no_grad():
        logits = gpt(tokens, torch.arange(tokens.size(1), device=here())[None], None)[0, 2:-1, :VOCABULARY]
    assert logits.argmax(-1).tolist() == sample.tokens
    expected = logits.log_softmax(-1).max(-1).values.tolist()
    assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    assert [max(some, key=some.get) for some in sample.alternatives] == sample.tokens
    assert [len(some) for some in sample.alternatives] == [2] * 8


def test_lengths_and_the_end_token(sampler, gpt):
    samples = sampler.sample(PROMPTS, Options(num_tokens=99, seed=3))
    for sample in samples:
        assert END not in sample.tokens
        assert max(sample.tokens) < VOCABULARY
        assert sample.finished != (len(sample.ids()) == POSITIONS)
    assert {len(s.ids()) for s in sampler.sample(PROMPTS, Options(longest=6, temperature=0))} == {6}
    likely = samples[0].tokens[1]
    ended = Sampler(gpt, SimpleNamespace(eod=likely, vocab_size=VOCABULARY))
    (sample,) = ended.sample([PROMPTS[0]], Options(num_tokens=99, seed=3))
    assert sample.finished
    assert sample.tokens == samples[0].tokens[: samples[0].tokens.index(likely)]
    (sample,) = ended.sample([PROMPTS[0]], Options(num_tokens=99, seed=3, alternatives=1))
    assert len(sample.logprobs) == len(sample.alternatives) == len(sample.tokens) + 1, "and the end token's"


def test_the_one_who_watches_sees_each_token_and_may_end_a_text(sampler):
    seen: list[tuple[int, int]] = []

    def watch(place, sample):
        seen.append((place, sample.tokens[-1]))
        return place == 1 and len(sample.tokens) == 3

    samples = sampler.sample(PROMPTS, Options(num_tokens=5, temperature=0), watch)
    assert [len(sample.tokens) for sample in samples] == [5, 3, 5, 5]
    assert [sample.finished for sample in samples] == [False, True, False, False]
    for place, sample in enumerate(samples):
        assert [token for at, token in seen if at == place] == sample.tokens


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_random_numbers_are_left_as_they_were(sampler, gpt, training):
    gpt.train(training)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    before = sampler.sample([[1]], DRAWN)
    assert gpt.training == training
    assert all(module.training == training for module in gpt.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert texts(sampler.sample([[1]], DRAWN)) == texts(before)
    gpt.train()  # what generation has cached must not keep the model from being trained
    gpt(
        torch.ones(1, 4, dtype=int, device=here()), torch.arange(4, device=here())[None], None
    ).sum().backward()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, VOCABULARY], "from 0 to 49"),
        ([-1], "from -1"),
        ([1] * 24, "24 tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_anything_is_drawn(sampler, prompt, message):
    with pytest.raises(UsageError, match=message):
        sampler.sample([[1], prompt], DRAWN, lambda *_: pytest.fail("drawn"))


def test_a_model_that_has_diverged_is_refused(sampler, gpt):
    weight = gpt.decoder.final_layernorm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(UsageError, match="NaN or infinite"):
        sampler.sample([[1]], DRAWN)
    with torch.no_grad():
        weight.copy_(before)
