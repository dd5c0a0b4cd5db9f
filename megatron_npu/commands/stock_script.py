"""Run stock scripts under the names that the guide uses, ``pretrain_gpt.py`` and ``main.py``.

The guide moves them into the root of Megatron-LM: ``main.py`` beside the folder of its stock script, and
``pretrain_gpt.py`` over the stock script, which is then read from git.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli


def main(file: str, name: str) -> int:
    """Run a stock script with the arguments of this process.

    Return its exit code, or 2 if the script is not found.

    Args:
        file: the replacement script, in ``tests_gpt`` or moved into the root of Megatron-LM.
        name: the path of the stock script, relative to the root of Megatron-LM.
    """
    standing = Path(file).resolve()
    try:
        root = _checkout(standing, name)
        if (root / name).resolve() != standing:
            return cli.main(["run", str(root / name), *sys.argv[1:]])
        return _run_replaced(root, name)
    except UsageError as error:
        print(f"{standing.name}: error: {error}", file=sys.stderr)
        return 2


def _checkout(standing: Path, name: str) -> Path:
    """Return the Megatron-LM checkout that is configured or that contains the script or this project."""
    named = settings.MEGATRON_PATH.get()
    roots = [Path(named)] if named else [standing.parent, *standing.parents[2:3]]
    for root in roots:
        if (root / name).is_file() and (root / "megatron").is_dir():
            return root.resolve()
    raise UsageError(
        f"{' or '.join(map(str, roots))} contains no {name} from Megatron-LM; the root of a Megatron-LM "
        "checkout is required",
        remedy=f"Clone this project inside one, as the guide does, or set {settings.MEGATRON_PATH.name}.",
    )


def _run_replaced(root: Path, name: str) -> int:
    """Run the committed version of a stock script that the ``mv`` command in the guide has overwritten."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, Path(name).name)
        script.write_bytes(_committed(root, name))
        os.environ[settings.MEGATRON_PATH.name] = str(root)  # from there it takes Megatron
        return cli.main(["run", str(script), *sys.argv[1:]])


def _committed(root: Path, name: str) -> bytes:
    command = ["git", "-C", str(root), "show", f"HEAD:./{name}"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
        content, reason = done.stdout, done.stderr.decode(errors="replace").strip().partition("\n")[0]
    except OSError as error:
        content, reason = b"", str(error)
    if not content or b"stock_script.main" in content:
        raise UsageError(
            f"{root / name} was overwritten by the file of the same name from tests_gpt, and git has no "
            f"stock version of it ({reason or 'the committed file is ours too'})",
            remedy=f"Restore the stock {name}, or set {settings.MEGATRON_PATH.name} to another checkout "
            "of Megatron-LM.",
        )
    return content
