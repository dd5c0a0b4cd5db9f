"""Create small tokenizers, in the form of the folders of published models."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SAMPLE = ["To be, or not to be, that is the question: 12 34 567", "the end of the user's question"] * 3
GPT2_CONFIG = {"model_type": "gpt2", "eos_token_id": 50256}  # what transformers needs to know of a model


def byte_level(
    *pieces: pre_tokenizers.PreTokenizer, special: tuple[str, ...] = ("<|endoftext|>",), words: bool = True
) -> Tokenizer:
    """Return a byte-level BPE of about 300 tokens.

    Args:
        pieces: how a text is cut before it is cut as GPT-2 does.
        special: tokens that are added.
        words: cut as GPT-2 does; else tokens may go across words.
    """
    tokenizer = Tokenizer(models.BPE())
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, own]) if pieces else own
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_gpt2_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write ``vocab.json`` and ``merges.txt``, with ``<|endoftext|>`` as the last token, as in GPT-2."""
    content = json.loads(tokenizer.to_str())["model"]
    vocabulary = dict(content["vocab"])
    vocabulary.setdefault("<|endoftext|>", len(vocabulary))
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in content["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
