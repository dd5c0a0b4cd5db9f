"""Files of ranks, as years of Megatron have left them: found, read without running them, and joined."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import model_card
from megatron_npu.pretrain.checkpoint import stock_checkpoints, torch_format
from megatron_npu.pretrain.checkpoint.torch_format import names, shards
from tests.support.payload import Runs

LAYERS, HIDDEN, HEADS, ROWS = 4, 128, 2, 96
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "padded_vocab_size": ROWS,
    "tokenizer_type": "GPT2BPETokenizer",
}


def whole_model(gated: bool = False) -> dict[str, torch.Tensor]:
    """Return random weights under megatron-core's names."""
    generator = torch.Generator().manual_seed(0)
    fc1 = 96 if gated else 64
    shapes = {"input_layernorm": (HIDDEN,), "pre_mlp_layernorm": (HIDDEN,)}
    shapes |= {
        "self_attention.linear_qkv": (3 * HIDDEN, HIDDEN),
        "self_attention.linear_proj": (HIDDEN, HIDDEN),
    }
    shapes |= {"mlp.linear_fc1": (fc1, HIDDEN), "mlp.linear_fc2": (HIDDEN, fc1 // (1 + gated))}
    found = {
        "embedding.word_embeddings.weight": (ROWS, HIDDEN),
        "embedding.position_embeddings.weight": (16, HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            found[f"decoder.layers.{layer}.{name}.weight"] = shape
            found[f"decoder.layers.{layer}.{name}.bias"] = shape[:1]
    found |= {"decoder.final_layernorm.weight": (HIDDEN,), "decoder.final_layernorm.bias": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in found.items()}


def nested(weights: dict[str, torch.Tensor]) -> dict:
    """Return weights as 285068c8 keeps them."""
    model: dict = {}
    for name, weight in weights.items():
        *folders, last = names.to_285068c8(name)
        place = model
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = weight
    return model


def save(root: Path, folder: str, *, zipped: bool = True, **content: object) -> Path:
    """Write the file of one rank of a release."""
    file = root / "release" / folder / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file


def same(found: torch_format.Checkpoint, weights: dict[str, torch.Tensor]) -> bool:
    return found.names() == weights.keys() and all(
        torch.equal(found.whole(name), weight) for name, weight in weights.items()
    )


def in_the_order_of(version: float, qkv: torch.Tensor) -> torch.Tensor:
    """Return a ``linear_qkv`` of today as ``checkpoint_version`` 0 or 1 has it."""
    heads = qkv.unflatten(0, (HEADS, 3, HIDDEN // HEADS))
    return (heads.transpose(0, 1) if version == 0 else heads.transpose(1, 2)).flatten(0, 2)


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_every_version_and_the_file_formats_of_old(version, tmp_path):
    """The first two ordered query, key and value otherwise; ``transformer``, ``attention`` are old names."""
    weights = whole_model()
    if version < 2:
        stored = {n: in_the_order_of(version, w) if ".linear_qkv." in n else w for n, w in weights.items()}
        model = nested(stored)
        text = model["language_model"]
        text["transformer"] = {
            n.replace("self_attention", "attention"): w for n, w in text.pop("encoder").items()
        }
    else:
        model = nested(weights)
    said = {} if version == 0 else {"checkpoint_version": version}
    save(tmp_path, "mp_rank_00", zipped=version > 0, model=model, args=Namespace(**ARGS), iteration=7, **said)
    found = torch_format.Checkpoint(tmp_path / "release")
    assert same(found, weights)
    assert found.iteration == 7


def test_without_arguments_it_is_a_gpt2_of_these_shapes(tmp_path, caplog):
    """As NVIDIA's first models: neither a tracker, nor arguments, nor a version."""
    pytest.importorskip("megatron.core")
    save(tmp_path, "mp_rank_00", zipped=False, model=nested(whole_model()), total_iters=5)
    found = stock_checkpoints.find(tmp_path)
    assert "2 heads of size 64, as in GPT-2" in caplog.text
    wanted = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "padded_vocab_size")
    assert [found.arguments[name] for name in wanted] == [LAYERS, HIDDEN, HEADS, 64, ROWS]
    assert found.arguments["max_position_embeddings"] == 16
    assert found.iteration == 5


def test_a_lone_file_is_a_checkpoint_if_it_has_the_whole_model(tmp_path):
    pytest.importorskip("megatron.core")
    model = nested(whole_model())
    file = save(tmp_path, "mp_rank_00", model=model, args=Namespace(**ARGS), checkpoint_version=3.0)
    for named in (file, file.parent):
        found = stock_checkpoints.find(named)
        assert found.path == file.parent
        assert found.arguments["num_layers"] == LAYERS
    torch.save({"model": model, "args": Namespace(**ARGS, tensor_model_parallel_size=2)}, file)
    with pytest.raises(UsageError, match="is incomplete"):
        stock_checkpoints.find(file.parent)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_tensor_ranks_stages_and_interleaved_chunks(chunks, gated, tmp_path):
    """Names of megatron-core, with Transformer Engine's for the norms; the last stage has a tied copy."""
    weights, stages, tensor = whole_model(gated), 2, 2
    per_chunk = LAYERS // stages // chunks
    for rank in range(tensor):
        for stage in range(stages):
            content: dict = {}
            for chunk in range(chunks):
                first = (chunk * stages + stage) * per_chunk
                own = {
                    name.replace(f"layers.{first + number}.", f"layers.{number}."): weight
                    for number in range(per_chunk)
                    for name, weight in weights.items()
                    if name.startswith(f"decoder.layers.{first + number}.")
                }
                if (stage, chunk) == (0, 0):
                    own |= {n: w for n, w in weights.items() if n.startswith("embedding.")}
                if (stage, chunk) == (stages - 1, chunks - 1):
                    own |= {n: w for n, w in weights.items() if "final_layernorm" in n}
                    own["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
                part = {n: shards.cut(n, w, tensor, gated=gated)[rank] for n, w in own.items()}
                of_te = {
                    n.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"): w
                    for n, w in part.items()
                }
                of_te["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
                content["model" if chunks == 1 else f"model{chunk}"] = of_te
            args = Namespace(
                **ARGS, swiglu=gated, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages
            )
            save(tmp_path, f"mp_rank_0{rank}_00{stage}", **content, args=args, checkpoint_version=3.0)
    assert same(torch_format.Checkpoint(tmp_path / "release"), weights)


def test_joining_is_the_inverse_of_cutting():
    for gated in (False, True):
        for name, weight in whole_model(gated).items():
            parts = shards.cut(name, weight, 2, gated=gated)
            assert torch.equal(shards.join(name, parts, gated=gated), weight)
    up, gate = torch.arange(4), torch.arange(4, 8)
    parts = shards.cut("decoder.layers.0.mlp.linear_fc1.bias", torch.cat([up, gate]), 2, gated=True)
    assert parts[0].tolist() == [0, 1, 4, 5]  # each rank computes with a part of both


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("trusted_by_torch", [False, True])
def test_what_would_run_is_refused(zipped, trusted_by_torch, tmp_path, monkeypatch):
    if trusted_by_torch:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "ran"
    save(tmp_path, "mp_rank_00", zipped=zipped, model={}, args=Namespace(evil=Runs(mark)))
    with pytest.raises(
        UsageError, match=r"model_optim_rng\.pt cannot be loaded safely: the \w+ refers to posix\.mkdir"
    ):
        stock_checkpoints.find(tmp_path)
    assert not mark.exists()


def test_missing_ranks_layers_and_words_are_named(tmp_path):
    pytest.importorskip("megatron.core")

    def refused(root: Path) -> str:
        with pytest.raises(UsageError) as caught:
            stock_checkpoints.find(root)
        return str(caught.value)

    args = Namespace(**ARGS, tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    save(tmp_path / "a", "mp_rank_00", model=nested(whole_model()), args=args)
    assert "1 x pipeline-parallel 1, but its arguments specify 2 x 1" in refused(tmp_path / "a")
    save(tmp_path / "a", "mp_rank_02", model={}, args=args)
    assert "no file for tensor rank 1, pipeline rank 0" in refused(tmp_path / "a")
    (tmp_path / "b" / "release" / "mp_rank_00").mkdir(parents=True)
    assert "no mp_rank_*/model_optim_rng.pt" in refused(tmp_path / "b")
    weights = {n: w for n, w in whole_model().items() if ".layers.3." not in n}
    save(tmp_path / "c", "mp_rank_00", model=nested(weights), args=Namespace(**ARGS), checkpoint_version=3.0)
    assert "have 3 layers, but the arguments in the files specify 4" in refused(tmp_path / "c")
    file = save(tmp_path / "d", "mp_rank_00", model=[])
    assert "the stored model is not a mapping of names to weights" in refused(tmp_path / "d")
    for number, named in enumerate(({"num_layers": -4}, {"num_layers": [4]}, {"consumed_train_samples": -1})):
        content = {"model": nested(whole_model()), "args": Namespace(**{**ARGS, **named})}
        save(tmp_path / f"n{number}", "mp_rank_00", **content, checkpoint_version=3.0)
        [(name, value)] = named.items()
        refusal = f"{name} must be at least 0 and less than {2**53}, but it is {value}"
        assert refusal in refused(tmp_path / f"n{number}")
    file.write_bytes(b"no archive")
    assert "model_optim_rng.pt" in refused(tmp_path / "d")
    save(
        tmp_path / "e",
        "mp_rank_00",
        model=nested(whole_model()),
        args=Namespace(**ARGS),
        checkpoint_version=3.0,
    )
    found = stock_checkpoints.find(tmp_path / "e")
    with pytest.raises(UsageError, match="a vocabulary of 96 tokens including padding"):
        stock_checkpoints.require_vocabulary(found, 97)


def test_the_card_of_a_stock_checkpoint_says_how_it_was_trained(tmp_path):
    """Its arguments are in the file; a dense model has no experts, whatever they say."""
    pytest.importorskip("megatron.core")
    trained = {"lr": 5e-4, "train_iters": 20, "lr_decay_style": "cosine", "num_experts": None}
    args = Namespace(**ARGS, **trained, moe_router_topk=2, data_path=["1.0", "/home/me/codeparrot_document"])
    file = save(tmp_path, "mp_rank_00", model=nested(whole_model()), args=args, checkpoint_version=3.0)
    found = stock_checkpoints.find(file)
    model_card.write(tmp_path, found, args, {"architectures": ["GPT2LMHeadModel"]}, "fp16")
    card = (tmp_path / "README.md").read_text()
    for row in ("| `--lr` | 0.0005 |", "| `--train-iters` | 20 |", "- data: `codeparrot_document`"):
        assert row in card
    assert "moe" not in card
    assert "/home/me" not in card
    bare = Namespace(**ARGS)
    torch.save({"model": nested(whole_model()), "args": bare, "checkpoint_version": 3.0}, file)
    model_card.write(tmp_path, stock_checkpoints.find(file), bare, {"architectures": ["x"]}, "fp16")
    assert "The checkpoint does not record how it was trained." in (tmp_path / "README.md").read_text()
