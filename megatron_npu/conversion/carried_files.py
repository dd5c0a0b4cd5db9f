"""Copy the files that a conversion does not change, which are those of the tokenizer and the generation
settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import config

TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model spiece.model tekken.json chat_template.jinja chat_template.json"
).split()
_MORE_TEMPLATES = "additional_chat_templates"  # a folder; a model may be told to answer in several ways
GENERATION = "generation_config.json"
# What a tokenizer can be made of; the others only describe one.
_VOCABULARIES = frozenset(
    "tokenizer.json vocab.json merges.txt tokenizer.model spiece.model tekken.json".split()
)


def copy(source: Path, destination: Path) -> None:
    """Copy ``config.json``, the tokenizer and the generation settings, if they exist, to another folder.

    The folder is created if needed.

    Raises:
        UsageError: a link points outside the source folder.
    """
    destination.mkdir(exist_ok=True)
    for path in (*_present(source, (*TOKENIZER, GENERATION, config.NAME)), *_templates(source)):
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(_inside(path, source), target)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer from one folder to another, and replace an existing tokenizer.

    Raises:
        UsageError: a link points outside the source folder.
    """
    remove_tokenizer(destination)
    for path in _present(source, TOKENIZER):
        shutil.copyfile(_inside(path, source), destination / path.name)


def remove_tokenizer(folder: Path) -> None:
    """Remove the tokenizer and its related files from a folder."""
    for path in _present(folder, TOKENIZER):
        path.unlink()
    shutil.rmtree(folder / _MORE_TEMPLATES, ignore_errors=True)


def vocabularies(folder: Path) -> list[str]:
    """Return the names of those files in a folder from which a tokenizer can be created."""
    return [path.name for path in _present(folder, TOKENIZER) if path.name in _VOCABULARIES]


def _present(folder: Path, names: tuple[str, ...] | list[str]) -> Iterator[Path]:
    return (folder / name for name in names if (folder / name).is_file())


def _templates(folder: Path) -> Iterator[Path]:
    return (path for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")) if path.is_file())


def _inside(path: Path, folder: Path) -> Path:
    """Return the target of a symbolic link, or the path itself if it is not a link.

    The copied files are distributed with the checkpoint, so a link must not make an unrelated file part of
    it. Links are common, because the cache of huggingface_hub consists of them:
    ``snapshots/REVISION/tokenizer.json`` points to ``blobs/HASH``.

    Raises:
        UsageError: the link points outside the folder.
    """
    home, real = folder.resolve(), path.resolve()
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(place) for place in allowed):
        raise UsageError(
            f"{path} is a link to {real}, but it must be a regular file, or a link to a file in {folder}. "
            "If the file belongs to the model, copy it into the folder."
        )
    return real
