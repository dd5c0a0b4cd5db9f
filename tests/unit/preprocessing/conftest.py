"""A tiny tokenizer, and a way to run the command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megatron_npu.base import installed_packages
from megatron_npu.data.preprocessing import command
from tests.conftest import ROOT, Vocabulary, checkout
from tests.support import processes, warm

SAMPLE = """From fairest creatures we desire increase, that thereby beauty's rose might never die.
He's seen 42 things, they'll say: "I'd rather've not"; naïve café — Ωμέγα, 你好世界, 🙂🙂!\n\n\tIndented.  """


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """A byte-level BPE of 400 tokens, trained here."""
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    tokenizer.model.save(str(directory))
    return Vocabulary(directory / "vocab.json", directory / "merges.txt")


@pytest.fixture
def corpus_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes documents as JSON lines."""

    def write(documents: Iterable[object], name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
        return path

    return write


@pytest.fixture
def stock_tool(tmp_path: Path) -> Callable[..., Path]:
    """Return a function: flags -> the prefix that Megatron-LM's own tool has written for the key ``text``.

    Where it needs files beside its input, it writes them; ``level`` is how its output ends.
    """
    tree = checkout("megatron_core", "0.16.1")

    def run(*flags: str, level: str = "document", **environment: str) -> Path:
        runner = ROOT / "benchmarks" / "stock_preprocess.py"
        command = [sys.executable, str(runner), str(tree), *flags]
        command += ["--output-prefix", str(tmp_path / "stock")]
        # what takes longest behind torch; not nltk, which is told at its import where its data are
        slow = {"transformers": "transformers", "scipy": "scipy.stats"}
        modules = tuple(slow[name] for name in slow if installed_packages.is_installed(name))
        command, env = warm.plain(command, {**os.environ, **environment}, modules)
        processes.run(command, check=True, env=env)
        return tmp_path / f"stock_text_{level}"

    return run


@pytest.fixture
def preprocess(tiny: Vocabulary, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs the command and gives the prefix of the key ``text``."""

    def run(
        *inputs: Path, prefix: str = "out", vocabulary: Vocabulary = tiny, flags: Iterable[str] = ()
    ) -> Path:
        arguments = ["--input", *map(str, inputs), "--output-prefix", str(tmp_path / prefix)]
        arguments += ["--vocab-file", str(vocabulary.vocab_file), "--merge-file", str(vocabulary.merge_file)]
        assert command.main([*arguments, *flags]) == 0
        return tmp_path / f"{prefix}_text_document"

    return run
