"""The output layer and the loss in one: the same numbers as through the logits, and who still gets those."""

from __future__ import annotations

import pytest
import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.layers import output_layer
from megatron_npu.adaptors.shared.layers import output_layer as shared
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch
from tests.adaptors.megatron_core.conftest import make_config
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")

LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
WORDS = 200


@pytest.fixture
def in_one(monkeypatch):
    """The calls of the operation, each by whether it was to compute again."""
    calls, operation = [], shared.linear_cross_entropy

    def spied(*args, **kwargs):
        calls.append(kwargs["recompute"])
        return operation(*args, **kwargs)

    monkeypatch.setattr(shared, "linear_cross_entropy", spied)
    return calls


def gpt(tied=True, parallel_output=True, **changes):
    """A GPT under Megatron's data-parallel wrapper, always the same."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1)
    config = make_config(num_layers=1, **changes)
    layer = get_gpt_layer_local_spec()
    further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    model = GPTModel(
        config,
        layer,
        WORDS,
        8,
        mtp_block_spec=further,
        share_embeddings_and_output_weights=tied,
        parallel_output=parallel_output,
    ).to(here())
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.zero_grad_buffer()
    return wrapped


def forward(model, **arguments):
    tokens = (torch.arange(16).view(2, 8) * 13 % WORDS).to(here())
    positions = torch.arange(8, device=here()).expand(2, 8)
    return model(tokens, positions, None, **arguments)


def loss_of(model):
    return forward(model, labels=(torch.arange(16).view(2, 8) * 7 % WORDS).to(here()))


def trained(model, steps=2):
    """The loss, and all gradients of several micro-batches, as the wrapper adds them up."""
    for _ in range(steps):
        loss = loss_of(model)
        loss.mean().backward()
    model.finish_grad_sync()
    return loss, {name: parameter.main_grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("fused_sum", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("flags", [{}, LINEAR], ids=["default", "linear"])
def test_loss_and_gradients_are_those_through_the_logits(in_one, monkeypatch, flags, tied, fused_sum):
    loss, gradients = trained(gpt(tied, gradient_accumulation_fusion=fused_sum, **flags))
    taken = bool(flags) or devices.current().name == "cpu"
    assert in_one == [bool(flags)] * 2 * taken
    monkeypatch.setattr(output_layer, "_is_wanted", lambda *_: False)
    expected, right = trained(gpt(tied, gradient_accumulation_fusion=fused_sum))
    assert len(in_one) == 2 * taken
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, right)


@pytest.mark.parametrize("flags", [{}, LINEAR], ids=["default", "linear"])
def test_a_forward_that_somebody_has_put_there_is_asked_and_stays(in_one, flags):
    """Of the instance, as wrappers for quantisation or measurement put it there."""
    model = gpt(**flags)
    layer = model.module.output_layer
    shapes, original = [], layer.forward

    def forward_of_others(*args, **kwargs):
        logits, bias = original(*args, **kwargs)
        shapes.append(logits.shape)
        return 2 * logits, bias

    plain = loss_of(model)
    in_one.clear()
    layer.forward = forward_of_others
    losses = [loss_of(model) for _ in range(2)]
    assert shapes == [(8, 2, WORDS)] * 2
    assert in_one == []
    assert vars(layer)["forward"] is forward_of_others
    assert not torch.allclose(losses[0], plain)
    if flags:
        reason = "the output layer has its own forward method"
        assert dispatch.fallbacks["cross-entropy-fusion-impl linear", reason] >= 1


def test_each_further_word_that_is_predicted_has_its_loss_in_one(in_one, monkeypatch):
    """--mtp-num-layers: the gradients of their losses come through the hidden states."""
    _, gradients = trained(gpt(mtp_num_layers=2, **LINEAR), steps=1)
    assert in_one == [True] * 3
    monkeypatch.setattr(output_layer, "_is_wanted", lambda *_: False)
    _, right = trained(gpt(mtp_num_layers=2), steps=1)
    assert len(in_one) == 3
    torch.testing.assert_close(gradients, right)


def right_tokens(logits, labels, mask):
    """``_compute_mtp_acceptance_counts`` of 0.19, for one tensor-parallel rank."""
    right = (logits.argmax(-1) == labels.t()) & mask.t().bool()
    return right.sum().float(), mask.sum().float()


def test_right_further_tokens_are_counted_without_whole_logits(monkeypatch):
    layer = gpt(tied=False).module.output_layer
    hidden = torch.randn(8, 2, layer.weight.size(1), device=here())
    labels, mask = torch.randint(WORDS, (2, 8), device=here()), torch.ones(2, 8, device=here())
    mask[1, 3:] = 0
    logits = hidden @ layer.weight.t()
    labels[:, ::2] = logits.argmax(-1).t()[:, ::2]
    monkeypatch.setattr(output_layer, "_TOKENS_AT_ONCE", 3)
    sizes = []

    def spied(logits, *rest):
        sizes.append(len(logits))
        return right_tokens(logits, *rest)

    counting = output_layer.count_right_further_tokens
    counts = counting(spied, output_layer.Factors(layer, hidden, layer.weight), labels, mask)
    assert counts == right_tokens(logits, labels, mask) == counting(right_tokens, logits, labels, mask)
    assert 6 <= counts[0] < counts[1] == 11
    assert sizes == [3, 3, 2]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("use_mup", "--use-mup scales the logits"), ("mtp_detach_heads", "--mtp-detach-heads keeps gradients")],
)
def test_flags_of_newer_megatrons_that_want_the_logits(in_one, flag, reason):
    model = gpt(**LINEAR)
    setattr(model.module.config, flag, True)  # 0.17 and 0.19 have them
    loss_of(model)
    assert not in_one
    assert any(told.startswith(reason) for _, told in dispatch.fallbacks)


def test_who_gives_no_labels_gets_the_logits(in_one):
    assert forward(gpt(**LINEAR)).shape == (2, 8, WORDS)
    assert not in_one


def test_who_gathers_the_logits_gets_them_and_is_told(in_one, monkeypatch):
    """And the loss is upstream's native one, which knows no linear."""
    loss = loss_of(gpt(parallel_output=False, **LINEAR))
    assert not in_one
    assert ("cross-entropy-fusion-impl linear", "the logits are gathered") in dispatch.fallbacks
    torch.testing.assert_close(loss, loss_of(gpt()))
    monkeypatch.setenv(settings.STRICT.name, "1")
    with pytest.raises(UsageError, match="the logits are gathered"):
        loss_of(gpt(parallel_output=False, **LINEAR))


@pytest.mark.parametrize("flags", [{}, LINEAR], ids=["default", "linear"])
def test_a_hook_on_the_output_layer_is_given_the_logits(in_one, flags):
    """Distillation (0.19) saves them so; a hook that is removed leaves the operation its work."""
    model, seen = gpt(**flags), []
    expected = loss_of(model)
    in_one.clear()
    handle = model.module.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    torch.testing.assert_close(loss_of(model), expected)
    handle.remove()
    assert [logits.shape for logits in seen] == [(8, 2, WORDS)]
    assert not in_one
    if flags:
        loss_of(model)
        assert in_one


def test_hooks_on_the_output_layer_run_and_its_forward_is_put_back():
    model = gpt(**LINEAR)
    layer, inputs = model.module.output_layer, []
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].shape))
    loss_of(model)
    assert inputs == [(8, 2, 32)]
    assert "forward" not in vars(layer)
