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
        ("num_layers", -1, "its num_layers must be a positive integer, but is -1"),
        ("num_layers", "2", "its num_layers must be a positive integer, but is '2'"),
        ("num_layers", True, "its num_layers must be a positive integer, but is True"),
        ("num_layers", None, "its num_layers must be a positive integer, but is None"),
        ("rotary_base", float("nan"), "its rotary_base must be an integer, but is nan"),
        ("bf16", "yes", "its bf16 must be on or off, but is 'yes'"),
        ("normalization", "Evil", "its normalization must be LayerNorm or RMSNorm, but is 'Evil'"),
        ("normalization", ["LayerNorm"], "its normalization"),
        ("tokenizer_vocab_size", "x", "but is 'x'"),
        ("hidden_dropout", 7, "--hidden-dropout must be .*, but got 7"),
        (
            "rotary_seq_len_interpolation_factor",
            0.0,
            "--rotary-seq-len-interpolation-factor must be .*, but got 0.0",
        ),
        ("window_attn_skip_freq", [1], "--window-attn-skip-freq"),
        ("position_embedding_type", "yarns", "but is 'yarns'"),
        ("num_layers", 10**400, "its num_layers must be a positive integer, but is 1000"),
        (
            "num_layers",
            10**9,
            "its model has at least 32,000,0.. weights, but its files have only 1,000,000 bytes",
        ),
        ("hidden_size", 10**12, "weights, but its files have only"),
        ("ffn_hidden_size", 10**12, "weights, but its files have only"),
        ("num_experts", 10**9, "weights, but its files have only"),
        ("kv_channels", 10**12, "weights, but its files have only"),
        ("max_position_embeddings", 10**12, "weights, but its files have only"),
        ("tokenizer_vocab_size", 10**12, "weights, but its files have only"),
        ("make_vocab_size_divisible_by", 10**12, "weights, but its files have only"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: object, told: str, found) -> None:
    with pytest.raises(UsageError, match=told.replace("32,000,0..", "32,000,0[0-9,]+")):
        described.arguments_of(found(**{name: value}))
