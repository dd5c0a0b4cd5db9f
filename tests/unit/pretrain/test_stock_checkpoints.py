"""What stock scripts keep of their arguments: read without running it, taken over or refused by name."""

from __future__ import annotations

import pickle
import re
import signal
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import serialization
from torch.distributed.checkpoint.api import CheckpointException

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoint_failures, checkpoint_files, stock_checkpoints
from megatron_npu.pretrain.flags import stock_arguments
from megatron_npu.safe_files import safe_load
from tests.support.payload import Runs

STOCK = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 8,
    "ffn_hidden_size": 128,
    "seq_length": 16,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "norm_epsilon": 1e-3,
    "apply_layernorm_1p": False,
    "swiglu": True,
    "add_bias_linear": False,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
    "tensor_model_parallel_size": 2,
    "lr": 1e-3,
    "num_experts": None,
    "add_position_embedding": True,
}


def write(root: Path, args: object) -> Path:
    """Write a checkpoint with nothing but its arguments."""
    place = root / "iter_0000003"
    place.mkdir(parents=True)
    torch.save({"args": args, "iteration": 3}, place / checkpoint_files.COMMON)
    checkpoint_files.set_latest(root, 3)
    return place / checkpoint_files.COMMON


def test_what_would_run_is_refused(tmp_path):
    file = write(tmp_path, Namespace(**STOCK, evil=Runs(tmp_path / "ran")))
    with pytest.raises(
        UsageError, match=r"common\.pt cannot be loaded safely: the \w+ refers to posix\.mkdir"
    ):
        stock_checkpoints.read_common(file)
    assert not (tmp_path / "ran").exists()


def test_classes_are_replaced_and_what_torch_allowed_stays_allowed(tmp_path):
    numbers = {"array": np.arange(3, dtype=np.uint32), "scalar": np.float64(0.5)}
    file = write(tmp_path, Namespace(exit_signal=signal.SIGTERM, params_dtype=torch.bfloat16, **numbers))
    with safe_load.allowing(signal.Signals, Namespace):
        before = set(serialization.get_safe_globals())
        args = stock_checkpoints.read_common(file)["args"]
        assert set(serialization.get_safe_globals()) == before
    assert not isinstance(args.exit_signal, signal.Signals)
    assert args.exit_signal.given == (15,)
    assert args.params_dtype is torch.bfloat16
    assert not isinstance(args.array, np.ndarray)


def write_among_shards(root: Path, args: object) -> Path:
    """Write what ``write`` does as megatron-core 0.19 does; return the checkpoint's own folder."""
    place = root / "iter_0000003"
    content = {checkpoint_files.COMMON_OBJECT: [{"args": args, "iteration": 3}]}
    whole = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(content, storage_writer=dcp.FileSystemWriter(place), planner=whole, no_dist=True)
    checkpoint_files.set_latest(root, 3)
    return place


def test_arguments_among_the_shards_are_found_and_not_run(tmp_path):
    pytest.importorskip("megatron.core")
    place = write_among_shards(tmp_path / "plain", Namespace(**STOCK, null_tokenizer_eod_id=None))
    found = stock_checkpoints.find(tmp_path / "plain")
    assert (found.iteration, found.arguments["layernorm_epsilon"]) == (3, 1e-3)
    assert found.arguments["vocab_size"] == 99  # since 0.18 the end of document is one of --vocab-size
    write_among_shards(tmp_path / "evil", Namespace(**STOCK, evil=Runs(tmp_path / "ran")))
    with pytest.raises(
        UsageError, match=r"iter_0000003 cannot be loaded safely: the \w+ refers to posix\.mkdir"
    ):
        stock_checkpoints.find(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()
    index = (place / ".metadata").read_bytes()
    (place / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"../../a.file"))
    with pytest.raises(UsageError, match=r"\.\./\.\./a\.file is not a valid file name"):
        stock_checkpoints.find(tmp_path / "plain")


def test_what_an_older_core_cannot_read_is_said(tmp_path, monkeypatch):
    package_info = pytest.importorskip("megatron.core.package_info")
    place = write_among_shards(tmp_path, Namespace(**STOCK))
    (place / "metadata.json").write_text("{}")
    monkeypatch.setattr(package_info, "MINOR", 18)
    with (
        pytest.raises(UsageError, match=r"by megatron-core 0\.19 or newer"),
        checkpoint_failures.reading(place),
    ):
        pass
    monkeypatch.setattr(package_info, "MINOR", 19)
    with checkpoint_failures.reading(place):
        pass


def test_a_reason_names_what_is_missing_in_one_line_without_stacks():
    """Up to a bound; of several processes that failed it is the first one's."""
    told = "Missing key(s) in state_dict: \n\t"
    keys = [f"decoder.layers.{number}.mlp.weight" for number in range(99)]
    error = RuntimeError(
        f"{told}{', '.join(keys[:9])}.\nException raised from load at file.cpp:1:\nframe #0: f"
    )
    assert checkpoint_failures.reason(error) == f"Missing key(s) in state_dict: {', '.join(keys[:9])}."
    several = CheckpointException("read", {3: (error, None), 5: (KeyError(), None)})
    assert checkpoint_failures.reason(several) == checkpoint_failures.reason(error)
    many = checkpoint_failures.reason(RuntimeError(told + ", ".join(keys)))
    assert len(many) < 1600
    assert re.search(r"… \(\d{4} more characters\)$", many)
    assert checkpoint_failures.reason(KeyError()) == "KeyError()"


def test_an_index_of_a_stranger_is_refused_by_what_it_names(tmp_path):
    """Nothing says that it is of Megatron: not even which file is missing depends on it."""
    pytest.importorskip("megatron.core")
    place = write_among_shards(tmp_path, Namespace(**STOCK))
    (place / "metadata.json").write_text("{}")
    (place / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(UsageError, match=r" refers to posix\.mkdir"), checkpoint_failures.reading(place):
        pass
    assert not (tmp_path / "ran").exists()
    (place / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(UsageError, match=r"lacks common\.pt"), checkpoint_failures.reading(place):
        pass


def test_broken_files(tmp_path):
    file = write(tmp_path, None)
    with pytest.raises(UsageError, match="contains no arguments"):
        stock_checkpoints.find(tmp_path)
    file.write_bytes(b"no archive")
    with pytest.raises(UsageError, match=r"common\.pt"):
        stock_checkpoints.find(tmp_path)


def test_the_model_is_taken_and_the_run_is_not(tmp_path):
    pytest.importorskip("megatron.core")
    write(tmp_path, Namespace(**STOCK))
    found = stock_checkpoints.find(tmp_path)
    assert (found.iteration, found.has_optimizer, found.has_rng) == (3, False, False)
    args = found.arguments
    assert args["num_query_groups"] == 4  # stock leaves 1 there where heads share nothing
    assert args["layernorm_epsilon"] == 1e-3
    assert args["ffn_hidden_size"] == 128
    assert args["rotary_base"] == 10000
    assert args["lr"] is None
    assert args["tensor_model_parallel_size"] == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 8, "moe_latent_size": 16}, "moe_latent_size 16"),
        ({"multi_latent_attention": True, "attention_output_gate": True}, "attention_output_gate"),
        ({"squared_relu": True}, "squared_relu"),
        ({"rotary_seq_len_interpolation_factor": 2}, "rotary_seq_len_interpolation_factor 2"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            "rope_scaling_factor 32.0, which the scripts",
        ),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"window_size": (8, -1)}, "window_size (8, -1)"),
        ({"tokenizer_type": "TikTokenizer"}, "but it is TikTokenizer"),
    ],
)
def test_what_the_driver_does_not_have_is_named(changes, named):
    pytest.importorskip("megatron.core")
    with pytest.raises(UsageError) as caught:
        stock_arguments.to_driver({**STOCK, **changes})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "position_embedding_type": "yarn",
            "yarn_beta_fast": 16.0,
            "rotary_scaling_factor": 4.0,
            "mscale": 0.5,
        },
        {"window_size": (8, 0), "window_attn_skip_freq": [0, 1]},
        {"tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": 7},
    ],
)
def test_what_only_some_scripts_can_be_told_is_taken(changes):
    pytest.importorskip("megatron.core")
    args = stock_arguments.to_driver({**STOCK, **changes})
    assert {name: args[name] for name in changes} == changes


def test_multi_latent_attention_and_further_layers_are_taken():
    pytest.importorskip("megatron.core")
    latent = {"multi_latent_attention": True, "rope_type": None, "kv_lora_rank": 24, "mtp_num_layers": 1}
    args = stock_arguments.to_driver({**STOCK, **latent})
    assert {name: args[name] for name in latent} == latent | {"rope_type": "yarn"}


@pytest.mark.parametrize(
    "changes",
    [{"fp8": "hybrid"}, {"recompute_granularity": "full"}, {"moe_router_topk": 8}, {"window_size": (8, 0)}],
    ids=lambda changes: next(iter(changes)),
)
def test_how_it_was_trained_does_not_matter(changes):
    pytest.importorskip("megatron.core")
    args = stock_arguments.to_driver({**STOCK, **changes})
    assert args.get("window_size") == changes.get("window_size")
