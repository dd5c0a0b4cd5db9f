"""The parser: Megatron's names and defaults, and one line for what is wrong."""

from __future__ import annotations

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import arguments


def test_defaults_are_those_of_megatron(flags):
    args = arguments.parse(flags())
    # megatron-core 0.16's CLI
    assert (args.hidden_dropout, args.attention_dropout) == (0.1, 0.1)
    assert (args.adam_beta1, args.adam_beta2, args.adam_eps) == (0.9, 0.999, 1e-8)
    assert (args.weight_decay, args.clip_grad, args.init_method_std) == (0.01, 1.0, 0.02)
    assert (args.lr_decay_style, args.min_lr, args.seed) == ("linear", 0.0, 1234)
    assert (args.initial_loss_scale, args.loss_scale_window, args.hysteresis) == (2**32, 1000, 2)
    assert args.add_bias_linear
    assert args.gradient_accumulation_fusion


def test_the_two_spellings_of_the_window_are_one(flags):
    upstream = arguments.parse(flags("--pre-tockens", "7", "--next-tockens", "0"))
    corrected = arguments.parse(flags("--pre-tokens", "7", "--next-tokens", "0"))
    assert (upstream.pre_tokens, upstream.next_tokens) == (7, 0)
    assert (corrected.pre_tokens, corrected.next_tokens) == (7, 0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--hiden-size", "3"], "--hidden-size"),  # the nearest flag is offered
        (["--nonsense-zzz"], "--nonsense-zzz"),
        (["--seed", "1", "stray"], "stray"),
        (["--num-layers", "0"], "--num-layers"),
        (["--num-layers", "two"], "--num-layers"),
        (["--normalization", "Batch"], "--normalization"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(flags, given, named):
    with pytest.raises(UsageError, match=named) as caught:
        arguments.parse(flags(*given))
    assert "\n" not in str(caught.value)


def test_a_missing_required_flag_is_named(flags):
    argv = flags()
    at = argv.index("--num-layers")
    with pytest.raises(UsageError, match="--num-layers"):
        arguments.parse(argv[:at] + argv[at + 2 :])


def test_flags_are_not_abbreviated(flags):
    with pytest.raises(UsageError, match="--num-lay"):
        arguments.parse(flags("--num-lay", "3"))
