"""Readers of files that are not pickles, each with a valid file, for tests/campaign/fuzz.py.

A reader takes the path of a file, and writes the other files that it needs next to that file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models

from megatron_npu.checkpoint_files import checksums
from megatron_npu.conversion import config, hf_files, model_card
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.data.tokenization.bert_wordpiece import BertWordPieceTokenizer
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from megatron_npu.evaluation import passages
from megatron_npu.finetune.run import checkpoint as of_train
from megatron_npu.pretrain.checkpoint import checkpoint_command, checkpoint_description, checkpoint_files
from megatron_npu.pretrain.report import history
from megatron_npu.pretrain.report.dashboard import snapshot
from tests.support import stock_lm

Reader = Callable[[Path], object]
TENSORS = {"w": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def folder_of(file: Path) -> Path:
    """Return the path of a copy of a file in a folder of its own."""
    return file.with_name(f"{file.name}-folder")


def named(file: Path, name: str) -> Path:
    """Return a copy of a file in a folder of its own, under the name that the file's reader expects."""
    folder = folder_of(file)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Path(shutil.copy(file, folder / name))


def read_checksums(file: Path) -> object:
    return checksums.damaged(named(file, checksums.NAME).parent)


def read_description(file: Path) -> object:
    return checkpoint_description._read(named(file, checkpoint_files.DESCRIPTION).parent)


def read_dataset_index(file: Path) -> object:
    index = named(file, "text.idx")
    index.with_suffix(".bin").write_bytes(np.arange(12, dtype="<u2").tobytes())
    prefix = index.with_suffix("")
    return indexed_dataset.validate(prefix, 300), list(indexed_dataset.sequence_lengths(prefix))


def read_vocabulary(file: Path) -> object:
    vocabulary = named(file, "vocab.json")
    vocabulary.with_name("merges.txt").write_text("#version: 0.2\n")
    return GPT2Tokenizer(vocabulary, vocabulary.with_name("merges.txt")).encode("a b")


def read_merges(file: Path) -> object:
    folder = named(file, "given.txt").parent
    vocabulary, _ = stock_lm.write_vocabulary(folder, merges=["a b"])
    return GPT2Tokenizer(vocabulary, folder / "given.txt").encode("a b")


def read_words(file: Path) -> object:
    return BertWordPieceTokenizer(file, lower_case=True).encode("a b")


def read_tokenizer(file: Path) -> object:
    folder = named(file, "tokenizer.json").parent
    (folder / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    return HuggingFaceTokenizer(folder).encode("a b")


def read_config(file: Path) -> object:
    return config.read(named(file, config.NAME).parent)


def _tensors(folder: Path) -> object:
    source = hf_files.Source(folder)
    return [(source.dtype(name), source.numel(name), source.read(name)) for name in source.names()]


def read_safetensors(file: Path) -> object:
    return _tensors(named(file, hf_files.SINGLE).parent)


def read_pytorch_bin(file: Path) -> object:
    return _tensors(named(file, hf_files.PICKLED).parent)


def read_shards(file: Path) -> object:
    from safetensors.torch import save_file

    folder = named(file, hf_files.INDEX).parent
    save_file(TENSORS, folder / "part.safetensors")
    return _tensors(folder)


def read_description_of_train(file: Path) -> object:
    place = named(file, checkpoint_files.DESCRIPTION_OF_TRAIN).parent
    return of_train._description(place), checkpoint_command._of_train(place)


def read_metrics(file: Path) -> object:
    return snapshot._state(history.read(file))


def read_summary(file: Path) -> object:
    place = named(file, "summary.json").with_name("iter_0000003")
    return model_card._losses(checkpoint_description.CheckpointInfo(place, 3, 12, 0, True, True, None, {}))


def read_passages(file: Path) -> object:
    words = folder_of(file).with_suffix(".words")
    words.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb")
    tokenizer = BertWordPieceTokenizer(words, lower_case=True)
    words.unlink()
    return passages.read_examples(str(file), tokenizer, cut="word", longest=8)


def whole() -> dict[str, tuple[Reader, bytes]]:
    """Return each reader with a valid file."""
    folder = Path(tempfile.mkdtemp())
    try:
        made = _made(folder)
    finally:
        shutil.rmtree(folder)
    return {name.removeprefix("read_").replace("_", "-"): (READS[name], made[name]) for name in READS}


def _made(folder: Path) -> dict[str, bytes]:
    """Return valid files, keyed by the name of their reader."""
    from safetensors.torch import save_file

    stock_lm.write_vocabulary(folder, merges=["a b"])
    save_file(TENSORS, folder / "w.safetensors")
    torch.save(TENSORS, folder / "w.bin")
    lengths = np.array([3, 4, 5], np.int32)
    with indexed_dataset.Writer(str(folder / "text"), np.dtype(np.uint16)) as writer:
        writer.add(np.arange(12, dtype=np.uint16).tobytes(), lengths, np.array([2, 1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    texts = {
        "read_checksums": {"algorithm": checksums.ALGORITHM, "files": {"weights": [7, "0" * 32]}},
        "read_description": {"iteration": 3, "consumed_train_samples": 12, "consumed_valid_samples": 0}
        | {"has_optimizer": True, "has_rng": True, "optimizer_sharding": None}
        | {"arguments": {"num_layers": 2, "hidden_size": 32}},
        "read_description_of_train": {"iteration": 3, "arguments": {"global_batch_size": 4}},
        "read_metrics": {"event": "start", "iteration": 0, "global_batch_size": 4, "train_iters": 9},
        "read_summary": {"iterations": 3, "loss_last": 2.5, "validation_loss": 2.4},
        "read_passages": {"text": "a b a b"},
        "read_config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "torch_dtype": "float32"},
        "read_shards": {"weight_map": {"w": "part.safetensors", "b": "part.safetensors"}},
    }
    names = {
        "read_vocabulary": "vocab.json",
        "read_merges": "merges.txt",
        "read_dataset_index": "text.idx",
        "read_tokenizer": "tokenizer.json",
        "read_safetensors": "w.safetensors",
        "read_pytorch_bin": "w.bin",
    }
    words = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])
    lines = [
        {"event": "train", "iteration": 2, "losses": [2.5, None], "tokens_per_second": 9.5, "loss": 2.5},
        {"event": "sample", "iteration": 2, "prompt": "a", "text": "b"},
        {"event": "validation", "iteration": 2, "loss": 2.4, "training_loss": 2.3},
    ]
    made = {name: json.dumps(values).encode() for name, values in texts.items()}
    made["read_metrics"] = b"".join(
        json.dumps(row).encode() + b"\n" for row in [texts["read_metrics"], *lines]
    )
    return (
        made
        | {name: (folder / file).read_bytes() for name, file in names.items()}
        | {"read_words": words.encode()}
    )


READS: dict[str, Reader] = {name: value for name, value in globals().items() if name.startswith("read_")}
