"""Read and write pins, which are fingerprints of upstream symbols, taken when a patch was written.

A pin file belongs to one version of one upstream. A symbol matches if it equals the pin of any version of its
upstream.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_npu.patching.fingerprint import fingerprint, signature

FORMAT = 1


class PinError(Exception):
    """Raised when a pin file cannot be read."""


@dataclass(frozen=True)
class Pin:
    """The fingerprint, the signature and the line of a symbol in one upstream version."""

    fingerprint: str
    signature: str
    line: int

    @classmethod
    def of(cls, nodes: list[ast.stmt]) -> Pin:
        """Create a pin from the statements that define a symbol.

        At least one statement is required.
        """
        return cls(fingerprint(nodes), " | ".join(map(signature, nodes)), nodes[0].lineno)


@dataclass
class PinFile:
    """The pins of one upstream version.

    Attributes:
        modules: maps a module's name to the SHA-256 of its file.
        targets: maps ``package.module:Qual.name`` to its pin.
    """

    upstream: str
    version: str
    modules: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Pin] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> PinFile:
        """Read one pin file.

        Raises:
            PinError: the file is not a pin file, or has another format version.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"the format of the file must be {FORMAT}, but it is {data['format']}")
            targets = {target: Pin(**pin) for target, pin in data["targets"].items()}
            return cls(data["upstream"], data["version"], data["modules"], targets)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PinError(f"{path} is not a readable pin file: {error}") from error

    @property
    def name(self) -> str:
        """The name of the pin file, ``<upstream>-<version>.json``."""
        return f"{self.upstream}-{self.version}.json"

    def json(self) -> str:
        """Return the content of the pin file as JSON.

        Equal pins give identical text.
        """
        data = {
            "format": FORMAT,
            "upstream": self.upstream,
            "version": self.version,
            "modules": dict(sorted(self.modules.items())),
            "targets": {target: asdict(pin) for target, pin in sorted(self.targets.items())},
        }
        return json.dumps(data, indent=2) + "\n"


@dataclass
class Pins:
    """All pin files of one upstream, in the order in which they are compared."""

    upstream: str
    files: list[PinFile] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path, upstream: str, version: str = "") -> Pins:
        """Read all pin files of ``upstream`` in ``directory``.

        The directory need not exist.

        Args:
            version: the upstream version, whose pins come first; the others follow, newest first.

        Raises:
            PinError: a file cannot be read.
        """
        files = [PinFile.read(path) for path in Path(directory).glob(f"{upstream}-*.json")]
        files.sort(key=lambda file: (file.version == version, _numbers(file.version)), reverse=True)
        return cls(upstream, [file for file in files if file.upstream == upstream])

    def of(self, target: str) -> dict[str, Pin]:
        """Return the pins of ``target``, keyed by upstream version."""
        return {file.version: file.targets[target] for file in self.files if target in file.targets}

    def voucher(self, target: str, module: str, digest: str) -> str:
        """Return the version whose pins match ``target`` and the digest of its module's file, or an empty
        string.
        """
        known = (f.version for f in self.files if f.modules.get(module) == digest and target in f.targets)
        return next(known, "")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
