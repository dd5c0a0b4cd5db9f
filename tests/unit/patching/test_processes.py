"""Child processes: forked and spawned ones are patched like their parent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import processes

REPOSITORY = Path(__file__).resolve().parents[3]

SETUP = """
from megatron_npu.patching.engine import Engine
from megatron_npu.patching.module_patch import Context
from megatron_npu.patching.registry import Registry

registry = Registry()

@registry.wrap("stockpkg.model:gelu", why="w")
def factory(old):
    return lambda x: ("wrapped", old(x))

engine = Engine(registry, prefixes=("stockpkg",), on_first=lambda: Context("upstream", "1.0", "cpu"))
engine.arm()
"""

SCRIPT = """
import multiprocessing
import sys
import arming
from stockpkg.model import gelu

def work(queue):
    import stockpkg.model
    queue.put((gelu(1), stockpkg.model.gelu(1), arming.engine.ledger.summary()))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get(timeout=200))
    child.join(200)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_are_patched(tmp_path: Path, method: str) -> None:
    files = {
        "arming.py": SETUP,
        "script.py": SCRIPT,
        "stockpkg/model.py": "def gelu(x):\n    return x + 1\n",
    }
    (tmp_path / "stockpkg").mkdir()
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    done = processes.run(
        [sys.executable, "script.py", method],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
    )
    expected = (("wrapped", 2), ("wrapped", 2), "1 applied, 0 drifted, 0 skipped")
    assert done.stdout.strip() == repr(expected), done.stderr


def test_importing_the_engine_imports_neither_torch_nor_the_host() -> None:
    code = (
        "import sys, megatron_npu.patching.engine; "
        "print(sorted({'torch', 'megatron', 'numpy', 'packaging'} & set(sys.modules)))"
    )
    done = processes.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
