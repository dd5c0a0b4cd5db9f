"""Commands run with closed standard streams, and no file gets the number of a closed one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import processes, tiny

_CODE = """
import sys
from megatron_npu.commands import cli
code = cli.main(["--version"])
with open(sys.argv[1], "w") as stream:
    assert stream.fileno() > 2, stream.fileno()
    print(code, *(each is not None for each in (sys.stdin, sys.stdout, sys.stderr)), file=stream)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams(tmp_path: Path, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    result = tmp_path / "result"
    done = processes.run(
        [sys.executable, "-c", _CODE, str(result)], env=tiny.environment(), cwd=tmp_path, preexec_fn=close
    )
    assert done.returncode == 0
    assert result.read_text() == "0 True True True\n"
