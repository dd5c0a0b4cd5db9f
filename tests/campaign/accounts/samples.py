"""What the trials read if nothing is wrong with it, and the commands that read it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.campaign.accounts import trials
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.trials import DONE, Try
from tests.support import tiny

NULL_TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "255")


class Samples:
    """Files of the user, made when they are first asked for."""

    def __init__(self, room: Room) -> None:
        self.room = room

    @functools.cached_property
    def dataset(self) -> Path:
        """The prefix of a dataset."""
        folder = self.room.folder / "data"
        if folder.exists():
            return folder / "text"
        folder.mkdir()
        tiny.write_dataset(folder / "text", documents=40)
        self.room.give(folder, self.room.user)
        return folder / "text"

    @functools.cached_property
    def checkpoint(self) -> Path:
        """A checkpoint after two iterations."""
        path = self.room.temporary / "checkpoint"
        if path.exists():
            return path
        words = [*self.pretrain(), "--train-iters", "2", "--save", str(path)]
        made = trials.made(self.room, Try("setup", "a checkpoint", words, DONE, limit=400))
        if made.verdict != "done":
            raise RuntimeError(f"no checkpoint: {made}")
        return path

    def changed_checkpoint(self, place: str, change: Callable[..., object], *given: Path) -> Path:
        """Return a copy of the checkpoint that belongs to the other account.

        Args:
            place: the name of its folder.
            change: changes the folder of the iteration.
            given: further arguments of ``change``.
        """
        folder = self.room.place(place)
        shutil.rmtree(folder)
        shutil.copytree(self.checkpoint, folder)
        [iteration] = folder.glob("iter_*")
        change(iteration, *given)
        self.room.give(folder)
        return folder

    @functools.cached_property
    def passages(self) -> Path:
        """A file for lambada."""
        return self.written("passages.jsonl", '{"text": "1 2 3 4 5"}\n' * 3)

    @functools.cached_property
    def lines(self) -> Path:
        """A file for preprocess."""
        return self.written("lines.jsonl", '{"text": "1 2 3"}\n' * 5)

    def written(self, name: str, text: str) -> Path:
        """Return a file of the user with a text."""
        path = self.room.folder / name
        if not path.exists():
            path.write_text(text)
            self.room.give(path, self.room.user)
        return path

    # commands

    def pretrain(self, dataset: Path | None = None) -> list[str]:
        """Return a training run of one iteration."""
        flags = tiny.flags_for(dataset or self.dataset)
        cache = ["--data-cache-path", str(self.room.temporary / "cache")]
        return ["pretrain", *flags, "--max-position-embeddings", "64", "--train-iters", "1", *cache]

    def generate(self, checkpoint: Path | None = None) -> list[str]:
        """Return the generation of two tokens."""
        return [
            "generate",
            "--load",
            str(checkpoint or self.checkpoint),
            "--prompt",
            "1 2",
            "--num-tokens",
            "2",
        ]

    def lambada(self) -> list[str]:
        """Return an evaluation, without its passages."""
        return ["lambada", "--load", str(self.checkpoint)]

    def preprocess(self, *more: str) -> list[str]:
        """Return a tokenization, without its input."""
        return ["preprocess", *NULL_TOKENIZER, "--output-prefix", str(self.room.temporary / "made"), *more]

    def convert(self, source: Path) -> list[str]:
        """Return the import of a Hugging Face folder."""
        target = self.room.temporary / f"converted {source.name}"
        return ["convert", "--from", "hf", "--to", "megatron", str(source), str(target)]

    def export(self, name: str, *more: str) -> list[str]:
        """Return the export of the checkpoint."""
        target = str(self.room.temporary / name)
        return ["convert", "--from", "megatron", "--to", "hf", str(self.checkpoint), target, *more]


def config(**changes: object) -> str:
    """Return the config.json of a small Llama."""
    found = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return json.dumps({**found, **changes})
