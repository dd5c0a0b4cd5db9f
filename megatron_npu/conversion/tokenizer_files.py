"""The files that come along with the weights: the tokenizer's, and keys that say nothing about the model."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_npu import files
from megatron_npu.conversion import config
from megatron_npu.errors import UsageError
from megatron_npu.tokenization.gpt2_bpe import END_OF_TEXT, GPT2Tokenizer
from megatron_npu.training import checkpoint_files, tokenizers

_TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model chat_template.jinja"
).split()
_FILES = (*_TOKENIZER, "generation_config.json", config.NAME)


def copy(source: Path, destination: Path) -> None:
    """Copy what there is of these files from one folder into another, which is made."""
    destination.mkdir(exist_ok=True)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def tokenizer_flags(folder: Path, vocabulary: int) -> list[str]:
    """Return the flags of the tokenizer in a Hugging Face folder, for a model of so many tokens.

    Without one that the driver can use it is the NullTokenizer: text is numbers then.
    """
    gpt2 = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    candidates = (
        # another byte-level BPE has these two files too, but not GPT-2's end of text
        ("GPT2BPETokenizer", gpt2, lambda: GPT2Tokenizer(gpt2[1], gpt2[3])),
        (
            "HuggingFaceTokenizer",
            ["--tokenizer-model", str(folder)],
            lambda: tokenizers.HuggingFaceTokenizer(folder),
        ),
    )
    for kind, flags, build in candidates:
        try:
            size = build().vocab_size
        except UsageError:
            continue
        if size <= vocabulary:
            more = ["--vocab-size", str(vocabulary)] if size < vocabulary else []
            return ["--tokenizer-type", kind, *flags, *more]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary - 1)]


def copy_from_checkpoint(root: Path, args: Namespace, destination: Path) -> dict[str, Any]:
    """Copy a checkpoint's tokenizer into a Hugging Face folder; return keys for its ``config.json``.

    Args:
        root: the checkpoint's directory, which has the files of Hugging Face if it was converted itself.
        args: its flags.
        destination: the folder.
    """
    folder = _hf_folder(root, args)
    if folder is not None:
        copy(folder, destination)
        (destination / config.NAME).unlink(missing_ok=True)
        return _harmless_keys(folder)
    if args.tokenizer_type != "GPT2BPETokenizer":
        return {"bos_token_id": None, "eos_token_id": args.tokenizer_vocab_size - 1}
    shutil.copyfile(args.vocab_file, destination / "vocab.json")
    shutil.copyfile(args.merge_file, destination / "merges.txt")
    described = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": args.max_position_embeddings,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    files.write(destination / "tokenizer_config.json", json.dumps(described, indent=2) + "\n")
    end = GPT2Tokenizer(args.vocab_file, args.merge_file).eod
    return {"bos_token_id": end, "eos_token_id": end}


def model_type(root: Path, args: Namespace) -> str | None:
    """Return the ``model_type`` that a checkpoint was converted from; None if it was not."""
    folder = _hf_folder(root, args)
    kind = None if folder is None else config.read(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def _hf_folder(root: Path, args: Namespace) -> Path | None:
    """Return the folder that the tokenizer came with, if it was one of Hugging Face."""
    named = {"GPT2BPETokenizer": args.vocab_file, "HuggingFaceTokenizer": args.tokenizer_model}
    path = named.get(args.tokenizer_type)
    near = [root / checkpoint_files.HF_FOLDER]
    if path is not None:
        near.insert(0, Path(path) if Path(path).is_dir() else Path(path).parent)
    return next((place for place in near if (place / config.NAME).is_file()), None)


def _harmless_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a ``config.json`` that do not change what the model computes."""
    ours = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
    values = config.read(folder)
    return {key: value for key, value in values.items() if key in config.HARMLESS - ours}
