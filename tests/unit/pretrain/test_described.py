"""A description of a checkpoint that cannot be one, refused before anything is built of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import described
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.flags import arguments

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 0 --tokenizer-type NullTokenizer --vocab-size 255"
)


@pytest.fixture
def found(tmp_path: Path):
    """Return a function: changes -> the description of a checkpoint whose files have 1 MB."""
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1_000_000))

    def described_with(**changes: object) -> CheckpointInfo:
        values = vars(arguments.parse(FLAGS.split())) | {"tokenizer_vocab_size": 256, "ffn_hidden_size": 128}
        return CheckpointInfo(
            path=tmp_path,
            iteration=1,
            consumed_train_samples=0,
            consumed_valid_samples=0,
            has_optimizer=False,
            has_rng=False,
            optimizer_sharding=None,
            arguments=values | changes,
        )

    return described_with


def test_what_was_saved_comes_back_and_unknown_flags_have_their_defaults(found) -> None:
    checkpoint = found(window_size=(7, 0))
    del checkpoint.arguments["rotary_base"]  # as if it were older than the flag
    values = described.arguments_of(checkpoint)
    assert values["rotary_base"] == arguments.parse(FLAGS.split()).rotary_base
    assert {name: values[name] for name in checkpoint.arguments} == checkpoint.arguments


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_layers", -1, "its num_layers is -1; expected a positive integer"),
        ("num_layers", "2", "its num_layers is '2'; expected a positive integer"),
        ("num_layers", True, "its num_layers is True"),
        ("num_layers", None, "its num_layers is None"),
        ("rotary_base", float("nan"), "its rotary_base is nan; expected an integer"),
        ("bf16", "yes", "its bf16 is 'yes'; expected on or off"),
        ("normalization", "Evil", "its normalization is 'Evil'; expected LayerNorm or RMSNorm"),
        ("normalization", ["LayerNorm"], "its normalization"),
        ("tokenizer_vocab_size", "x", "its tokenizer_vocab_size is 'x'"),
        ("hidden_dropout", 7, "--hidden-dropout 7"),
        ("rotary_seq_len_interpolation_factor", 0.0, "--rotary-seq-len-interpolation-factor 0.0"),
        ("window_attn_skip_freq", [1], "--window-attn-skip-freq"),
        ("position_embedding_type", "yarns", "its position_embedding_type is 'yarns'"),
        ("num_layers", 10**400, "its num_layers is 1000"),
        (
            "num_layers",
            10**9,
            "its model has at least 32,000,0.. weights, but its files only 1,000,000 bytes",
        ),
        ("hidden_size", 10**12, "weights, but its files only"),
        ("ffn_hidden_size", 10**12, "weights, but its files only"),
        ("num_experts", 10**9, "weights, but its files only"),
        ("kv_channels", 10**12, "weights, but its files only"),
        ("max_position_embeddings", 10**12, "weights, but its files only"),
        ("tokenizer_vocab_size", 10**12, "weights, but its files only"),
        ("make_vocab_size_divisible_by", 10**12, "weights, but its files only"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: object, told: str, found) -> None:
    with pytest.raises(UsageError, match=told.replace("32,000,0..", "32,000,0[0-9,]+")):
        described.arguments_of(found(**{name: value}))
