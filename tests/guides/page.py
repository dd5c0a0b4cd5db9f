"""A page of commands, run as a reader would run it: every ```bash block, in order, in one shell.

A block that no test can run has a comment before it, ``<!-- not run: REASON -->``; a test puts there what the
block would have brought. Sizes are made smaller by replacing text of the page; each such text must be there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support import bytecode, processes, tiny, warm

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = "== block of line "


class Block(NamedTuple):
    """One block of commands: the line where it begins, why it is not run (or None), and its text."""

    line: int
    reason: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [Block(1 + text.count("\n", 0, one.start("text")), one["reason"], one["text"]) for one in found]


def run(
    page: Path,
    folder: Path,
    smaller: Mapping[str, str],
    *,
    trained: Path | None = None,
    timeout: float = 500,
    **changes: str,
) -> dict[int, str]:
    """Run a page; return what each block has printed, by the line where it begins.

    Args:
        page: below docs/.
        folder: where the commands run.
        smaller: texts of the page, and what stands in their places.
        trained: what a training writes, if ``folder`` is a Megatron-LM: once it is there, ``python`` has
            imported the scripts' modules. What is started before has imported torch alone.
        timeout: seconds for the whole page.
        changes: to the environment.
    """
    script = ["set -euo pipefail"]
    for block in blocks(page):
        if block.reason is None:
            script += [f"printf '\\n{MARK}%d\\n' {block.line}", block.text]
    text = "\n".join(script)
    for size, smaller_size in smaller.items():
        assert size in text, f"{page.name} has no {size!r} in a block that is run"
        text = text.replace(size, smaller_size)
    finished = processes.run(
        ["bash", "-c", text],
        cwd=folder,
        env=_environment(folder, changes, trained),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    parts = finished.stdout.split(MARK)[1:]
    return {int(part.partition("\n")[0]): part.partition("\n")[2] for part in parts}


def output_of(page: Path, outputs: Mapping[int, str], command: str) -> str:
    """Return what the only block that holds ``command`` has printed."""
    [line] = [block.line for block in blocks(page) if block.reason is None and command in block.text]
    return outputs[line]


def _environment(folder: Path, changes: Mapping[str, str], trained: Path | None) -> dict[str, str]:
    """Return the environment of a reader who has installed this project: its commands are on the path."""
    env = warm.for_scripts({**tiny.environment(), **bytecode.elsewhere(), **changes})
    programs = folder.parent / "programs"
    programs.mkdir()
    # what pip writes for a command: unlike -m it does not look into the current folder
    entry = programs / "entry.py"
    entry.write_text("import sys\nfrom megatron_npu.commands.cli import main\nsys.exit(main())\n")
    python = shlex.quote(env["PYTHON"])
    later = ""
    if trained is not None:
        imported = warm.for_scripts(env, warm.STOCK, folder)["PYTHON"]
        names = f"PYTHON_EXEC={shlex.quote(imported)}; export PYTHON_EXEC"
        later = f'if [ -e {shlex.quote(str(trained))} ]; then {names}; exec "$PYTHON_EXEC" "$@"; fi\n'
    for name, before in (
        ("python", ""),
        ("python3", ""),
        ("torchrun", "-m torch.distributed.run"),
        ("megatron-npu", str(entry)),
    ):
        program = programs / name
        first = later if name == "python" else ""
        program.write_text(f'#!/bin/sh\n{first}exec {python} {before} "$@"\n')
        program.chmod(0o700)
    return {**env, "PATH": os.pathsep.join([str(programs), env["PATH"]])}
