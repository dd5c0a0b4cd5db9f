"""Models that generate under ``torch.inference_mode()``, as upstream's engines do, and are trained, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.adaptors.megatron_core.conftest import make_config
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")
LENGTH = 24  # which no other test has: what is kept per shape is made here


def small_gpt(position: str) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(5)
    model = GPTModel(make_config(), get_gpt_layer_local_spec(), 64, LENGTH, position_embedding_type=position)
    return model.to(here())


def causal_mask() -> Tensor:
    return torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool, device=here()).triu(1)


def padded_mask() -> Tensor:
    """A mask that is no causal one: the attention has to read it."""
    mask = causal_mask()
    mask[1, ..., :3] = True
    return mask


@pytest.mark.parametrize("mask_of", [causal_mask, padded_mask])
@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
@pytest.mark.parametrize("order", ["generate first", "train first"])
def test_generate_and_train(position: str, mask_of: Callable[[], Tensor], order: str) -> None:
    model = small_gpt(position)
    tokens = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(here())
    positions = torch.arange(LENGTH, device=here()).expand(2, LENGTH)
    lasting = mask_of()  # which both are handed

    def generate() -> list[Tensor]:
        model.eval()
        with torch.inference_mode():
            return [model(tokens, positions, mask) for mask in (mask_of(), lasting)]

    def train() -> Tensor:
        model.train()
        model.zero_grad()
        logits = model(tokens, positions, lasting)
        logits.float().logsumexp(-1).mean().backward()
        return logits.detach()

    outputs = [] if order == "train first" else generate()
    trained = train()
    outputs += generate()
    for output in outputs:
        torch.testing.assert_close(output, trained)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    torch.testing.assert_close(train(), trained)
