"""The flags of the fused attention: which layers have them, and from where."""

from __future__ import annotations

import argparse
import copy
import sys
import types

import pytest
import torch

from megatron_npu.adaptors.megatron_core.attention.layer_options import flags_of
from megatron_npu.options.attention_flags import AttentionFlags
from tests.adaptors.megatron_core.conftest import make_config
from tests.adaptors.megatron_core.core_attention import (
    attention_pair,
    document_mask,
    positional_attention,
    qkv,
)
from tests.support.comparison import here, same_gradients

pytestmark = pytest.mark.usefixtures("single_process")


def test_window_flags_reach_the_attention():
    _, stock = attention_pair(window_size=(3, 0))
    narrow, plain = attention_pair(flags=AttentionFlags(3, 0))
    leaves = qkv()
    for mask in (None, document_mask([12], [12])):
        torch.testing.assert_close(narrow(*leaves, mask), stock(*leaves, None))
    wide, _ = attention_pair(flags=AttentionFlags(65536, 65536))
    torch.testing.assert_close(wide(*leaves, None), plain(*leaves, None))


def test_window_flags_leave_cross_attention_alone():
    ours, stock = attention_pair(attention_type="cross", mask_type="no_mask", flags=AttentionFlags(1))
    leaves = qkv(queries=6)
    same_gradients(ours(*leaves, None), stock(*leaves, None), leaves)


def test_a_script_has_the_flags_among_its_arguments(monkeypatch):
    """Those of the configuration win: a script may build a model that is not of its own arguments."""
    script = types.SimpleNamespace(_GLOBAL_ARGS=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", script)
    assert flags_of(make_config()) == AttentionFlags()
    script._GLOBAL_ARGS = argparse.Namespace(pre_tokens=3, next_tokens=0, shape_order="BSH")
    config = make_config()
    assert flags_of(config) == AttentionFlags(3, 0, "BSH")
    assert positional_attention().layer_options.window == (3, 0)
    config.attention_flags = AttentionFlags(5)
    assert flags_of(config) == AttentionFlags(5)
    script._GLOBAL_ARGS = argparse.Namespace(window_size=None)  # of a program with a parser of its own
    assert flags_of(make_config()) == AttentionFlags()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_of_a_configuration_has_its_flags(copied):
    """Upstream copies configurations for experts, encoders, decoders, and inference."""
    config = make_config()
    config.attention_flags = AttentionFlags(3, 0)
    assert flags_of(copied(config)) == AttentionFlags(3, 0)


def small_gpt(flags=None, **changes):
    """Return a GPT, whose weights are always the same."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = make_config(add_qkv_bias=True, bias_activation_fusion=True, **changes)
    if flags is not None:
        config.attention_flags = flags
    torch.manual_seed(7)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=12).train().to(here())


def losses_of(*models):
    """Return the losses of a batch, and the gradients of the first weights; all forwards come first."""
    tokens = torch.arange(24, device=here()).view(2, 12) * 5 % 64
    position = torch.arange(12, device=here()).expand(2, 12)
    losses = [model(tokens, position, None, labels=tokens).mean() for model in models]
    for loss in losses:
        loss.backward()
    weights = [model.decoder.layers[0].self_attention.linear_qkv.weight for model in models]
    return list(zip(losses, [weight.grad for weight in weights], strict=True))


def test_two_models_of_one_process_keep_their_windows():
    """Also where a layer is computed again in the backward pass, when the other model has run meanwhile."""
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    narrow, wide = small_gpt(AttentionFlags(3, 0), **again), small_gpt(AttentionFlags(65536), **again)
    expected = losses_of(small_gpt(window_size=(3, 0))) + losses_of(small_gpt())
    found = losses_of(narrow, wide)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[0][1], found[1][1])
    assert narrow.state_dict().keys() == wide.state_dict().keys() == small_gpt().state_dict().keys()
