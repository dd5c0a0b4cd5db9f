"""A hybrid model's checkpoint (``*-*-``) in a GPT, and a GPT's in a hybrid, by main's scripts and ours."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import hybrid_layers
from megatron_npu.pretrain.flags import stock_arguments
from tests.adaptors.megatron_core.conftest import make_config
from tests.conftest import checkout
from tests.support import on_version, tiny, warm
from tests.support.stock_core import FLAGS, losses, norms, pretrain, run_script

GATED = {"gated_linear_unit": True, "add_bias_linear": False}
EXPERTS = {**GATED, "num_moe_experts": 4, "moe_router_topk": 2}


@pytest.mark.parametrize(("pattern", "layers"), [("*-*-", 2), ("*-|*-*-", 3), ("*E", 1)])
def test_attention_and_mlp_in_turn_are_the_layers_of_a_gpt(pattern: str, layers: int) -> None:
    assert hybrid_layers.layers_of_gpt(pattern) == layers


@pytest.mark.parametrize("pattern", ["M*-", "**--", "*-*E", "-*", "*-/M", "*"])
def test_other_hybrids_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="layer pattern"):
        hybrid_layers.layers_of_gpt(pattern)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("changes", [{}, GATED, EXPERTS], ids=["dense", "gated", "experts"])
@pytest.mark.parametrize("alike", [True, False], ids=["layers as an axis", "layers in keys"])
def test_a_gpt_looks_where_the_hybrid_has_its_weights(changes: dict[str, Any], alike: bool) -> None:
    """Each key once, in the layers 0 to 3, with the shape of the parameter and no axis of layers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = make_config(num_layers=2, **changes)
    spec = get_gpt_layer_local_spec(num_experts=changes.get("num_moe_experts"))
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    wanted = model.sharded_state_dict(metadata={"non_homogeneous_layers": not alike})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    hybrid_layers.point_at(wanted)
    assert hybrid_layers.is_of_hybrid(entry.key for entry in nested_values(wanted))
    apply_factories(wanted)
    entries = [entry for entry in nested_values(wanted) if isinstance(entry, ShardedTensor)]
    assert sum(entry.data.numel() for entry in entries) == parameters
    inside = [(found, entry) for entry in entries if (found := re.search(r"layers\.(\d+)\.(\w+)", entry.key))]
    assert {(int(found[1]) % 2, found[2]) for found, _ in inside} <= {
        *((0, name) for name in ("self_attention", "input_layernorm")),
        *((1, name) for name in ("mlp", "pre_mlp_layernorm")),
    }
    assert {int(found[1]) for found, _ in inside} == {0, 1, 2, 3}
    for _, entry in inside:
        assert len(entry.global_shape) == len(entry.local_shape) + entry.prepend_axis_num
        assert entry.prepend_axis_num == ("experts" in entry.key)  # which are an axis


def test_the_arguments_of_a_hybrid_are_those_of_its_gpt() -> None:
    known = {
        **{"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32},
        **{"tokenizer_type": "NullTokenizer", "vocab_size": 63, "padded_vocab_size": 128},
    }
    hybrid = {
        **{"hybrid_layer_pattern": "*-*-*-", "num_layers": 6, "is_hybrid_model": True, "mamba_num_heads": 8},
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    }
    assert stock_arguments.to_driver(known | hybrid) == stock_arguments.to_driver(known | {"num_layers": 3})
    with pytest.raises(UsageError, match="layer pattern M"):
        stock_arguments.to_driver(known | hybrid | {"hybrid_layer_pattern": "M*-"})


SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec".split()
DATA = [
    *"--mock-data --vocab-size 1024 --swiglu --disable-bias-linear --normalization RMSNorm".split(),
    *"--position-embedding-type rope --untie-embeddings-and-output-weights".split(),
]


def hybrid(tree: Path, folder: Path, *changes: str) -> Any:
    """Run pretrain_hybrid.py with what ``pretrain`` has, two layers as four of the pattern."""
    flags = [*FLAGS[2:], *DATA, *SPEC, "--hybrid-layer-pattern", "*-*-", *changes]
    return run_script(tree, folder, "pretrain_hybrid.py", *flags, MEGATRON_NPU_TE="local")


@pytest.mark.skipif(os.environ.get("TEST_EVERY_VERSION") != "1", reason="TEST_EVERY_VERSION=1 runs it")
def test_main_goes_on_as_a_hybrid_and_back(tmp_path: Path) -> None:
    """The optimizer's state, too. The second line of a process is the mean of its first two losses."""
    tree = checkout("megatron_core", on_version.MAIN)
    gpt, other = str(tmp_path / "gpt"), str(tmp_path / "hybrid")
    common = [*DATA[1:], "--train-iters", "6"]
    whole = pretrain(tree, tmp_path, *common, "--save", gpt, "--save-interval", "2")
    saving = ["--save", other, "--save-interval", "2", "--exit-interval", "4", "--train-iters", "6"]
    middle = hybrid(tree, tmp_path, "--load", gpt, "--ckpt-step", "2", *saving)
    end = pretrain(tree, tmp_path, *common, "--load", other)
    for later, first in ((middle, 2), (end, 4)):
        assert norms(later) == norms(whole)[first : first + 2]
        expected = losses(whole)[first : first + 2]
        assert losses(later) == pytest.approx([expected[0], sum(expected) / 2], abs=2e-6)
    wrong = pretrain(tree, tmp_path, *common, "--num-layers", "3", "--load", other)
    assert wrong.returncode != 0
    assert "because one attention layer and one MLP layer of the pattern form one GPT layer" in wrong.stderr
    Path(gpt, "latest_checkpointed_iteration.txt").write_text("4")
    tensors = [_converted(tree, Path(load), tmp_path / f"hf {Path(load).name}") for load in (gpt, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, rtol=1e-4, atol=1e-5)


def _converted(tree: Path, load: Path, into: Path) -> dict[str, torch.Tensor]:
    """Take a checkpoint to Hugging Face, which compares the logits of both."""
    from safetensors.torch import load_file

    command = tiny.command("convert", "--from", "megatron", "--to", "hf", str(load), str(into))
    env = tiny.environment() | {"MEGATRON_LM_PATH": str(tree)}
    done = warm.run(command, env=env, modules=warm.STOCK, tree=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "logits of both models in fp32" in done.stdout
    return load_file(into / "model.safetensors")
