"""Weights made on the host are drawn from the host's generator, in order, as on an NPU or a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_npu import devices
from tests.adaptors.megatron_core.conftest import make_config

STD = 0.02


@pytest.fixture
def draws(single_process):
    """Seed the host's generator; return one that draws what it will."""
    seeded = torch.Generator().manual_seed(7)
    devices.current().set_host_rng_state(seeded.get_state())
    return seeded


def config(**changes):
    init = partial(torch.nn.init.normal_, std=STD)
    return make_config(init_method=init, embedding_init_method=init, **changes)


def drawn(generator, *shape, std=STD):
    return torch.empty(shape).normal_(std=std, generator=generator)


def test_positions_and_what_comes_behind_them(draws):
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = LanguageModelEmbedding(config(), vocab_size=64, max_sequence_length=8)
    assert torch.equal(layer.word_embeddings.weight, drawn(draws, 64, 32))
    drawn(draws, 8, 32, std=1.0)  # torch's own, of nn.Embedding
    assert torch.equal(layer.position_embeddings.weight, drawn(draws, 8, 32))
    options = {"config": config(), "init_method": partial(torch.nn.init.normal_, std=STD)}
    linear = ColumnParallelLinear(32, 16, bias=False, **options)
    assert torch.equal(linear.weight, drawn(draws, 16, 32))


def test_a_router(draws):
    from megatron.core.transformer.moe.router import Router

    layer = torch.nn.Module()
    layer.config, layer.bias = config(), None
    layer.weight = torch.nn.Parameter(torch.empty(4, 32))
    Router.reset_parameters(layer)
    assert torch.equal(layer.weight, drawn(draws, 4, 32))


def test_a_layer_of_a_head(draws):
    from megatron.core.transformer.utils import get_linear_layer

    layer = get_linear_layer(8, 2, partial(torch.nn.init.normal_, std=STD))
    torch.nn.init.kaiming_uniform_(torch.empty(2, 8), a=5**0.5, generator=draws)  # torch's own, of nn.Linear
    torch.empty(2).uniform_(generator=draws)
    assert torch.equal(layer.weight, drawn(draws, 2, 8))


def test_without_the_flag_the_devices_generator_draws(draws):
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    before = devices.current().host_rng_state()
    LanguageModelEmbedding(config(use_cpu_initialization=False), vocab_size=64, max_sequence_length=8)
    assert torch.equal(devices.current().host_rng_state(), before)
