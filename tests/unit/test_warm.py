"""Forked interpreters behave as started ones: arguments, environment, files, signals, ends, children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONGEST, wait_until
from tests.support import processes, tiny, warm
from tests.support.warm import parents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    env = tiny.environment() | changes
    command = [sys.executable, *arguments]
    return warm.run(command, env=env, capture_output=True, text=True, check=False)


def test_it_is_another_interpreter_with_torch_in_it() -> None:
    done = run(
        "-c", "import sys; print('torch' in sys.modules, 'megatron' in sys.modules, sys.argv)", "a", "b"
    )
    assert done.stdout == "True False ['-c', 'a', 'b']\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("forked", [False, True])
def test_what_a_fork_starts_is_a_fork_where_that_is_asked_for(forked: bool) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    child = "import sys; print('torch' in sys.modules)"
    done = run("-c", code, child, **(warm.WARM_CHILDREN if forked else {}))
    assert done.stdout == f"{forked}\n", done.stderr


@pytest.mark.parametrize("name", ["MEGATRON_NPU_WATCHDOG", "MEGATRON_NPU_RENDEZVOUS_TIMEOUT"])
def test_what_only_a_run_reads_needs_no_other_parent(name: str) -> None:
    def program(**changes: str) -> str:
        return warm.ready([sys.executable], tiny.environment() | changes, ("json.tool",))[0][0]

    assert program(**{name: "1"}) == program()
    assert program(MEGATRON_NPU_VERIFY="norm") != program(), "Megatron's import reads it"


def test_environment_folder_and_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    (tmp_path / "script.py").write_text(
        "import os, sys, beside\nprint(beside.NAME, os.environ['MARK'], os.getcwd(), __name__, sys.argv)\n"
    )
    monkeypatch.chdir(tmp_path)
    script = str(tmp_path / "script.py")
    expected = f"found here {tmp_path} __main__ {[script, 'x']}\n"
    assert run(script, "x", MARK="here").stdout == expected
    assert "MARK" not in run("-c", "import os; print(*os.environ)").stdout.split()
    assert run("-m", "script", MARK="here").stdout.startswith("found here")


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import sys; sys.exit('what went wrong')", 1),
        ("import os; print('cannot be written'); os.close(1)", 120),
    ],
)
def test_it_ends_as_its_program_ends(code: str, returncode: int) -> None:
    assert run("-c", code).returncode == returncode


END = """
import atexit, ctypes, os, sys, threading, time, types
import torch

class Last:
    def __init__(self, name):
        self.name = name

    def __del__(self, write=os.write):
        write(1, self.name)

last = Last(b"module\\n")
imported = sys.modules["imported"] = types.ModuleType("imported")
imported.last = Last(b"imported\\n")
torch.distributed.last = Last(b"what a run made\\n")
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
ctypes.CDLL(None).printf(b"buffered by C\\n")
"""


def test_all_but_the_destructors_of_torch_is_done_at_its_end() -> None:
    done = run("-c", END)
    assert done.returncode == 0, done.stderr
    ends = ["atexit", "buffered by C", "imported", "module", "thread", "what a run made"]
    assert sorted(done.stdout.splitlines()) == ends


def test_one_run_leaves_nothing_to_the_next() -> None:
    assert run("-c", "import torch, random; torch.mark = random.seed(1)").returncode == 0
    done = run("-c", "import torch, random; print(hasattr(torch, 'mark'), random.random())")
    other = run("-c", "import torch, random; print(hasattr(torch, 'mark'), random.random())")
    assert done.stdout.startswith("False ")
    assert done.stdout != other.stdout, "each draws a seed of its own"


WAITING = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


def waiting() -> tuple[subprocess.Popen[str], int]:
    command, env = warm.ready([sys.executable, "-c", WAITING], tiny.environment())
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(number: signal.Signals) -> None:
    process, fork = waiting()
    process.send_signal(number)
    assert process.wait(LONGEST) == -number
    wait_until(lambda: gone(fork))


CHILDREN = """
import multiprocessing, sys

def ask(queue):
    queue.put((__name__, "torch" in sys.modules))

if __name__ == "__main__":
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=ask, args=(queue,))
        child.start()
        print(method, *queue.get())
        child.join()
        assert child.exitcode == 0
"""


def test_multiprocessing_and_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    assert run(str(script)).stdout == "spawn __mp_main__ True\nfork __main__ True\n"
    # in one piece: ranks share the pipe, and torchrun starts them with -u
    said = "os.environ['RANK'] + ('torch' in sys.modules) * ' has torch' + chr(10)"
    script.write_text(f"import os, sys; sys.stdout.write({said})\n")
    ranks = run(*tiny.torchrun(2), str(script))
    assert sorted(ranks.stdout.split("\n")) == ["", "0 has torch", "1 has torch"]


def test_a_program_from_standard_input() -> None:
    command, env = warm.ready([sys.executable, "-", "a"], tiny.environment())
    text = "import sys\nprint(__name__, sys.argv[1:])\n"
    done = processes.run(command, env=env, input=text, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['a']\n"


def test_options_of_the_interpreter() -> None:
    code = "import sys, warnings; warnings.warn('loud'); print(sys.dont_write_bytecode)"
    done = run("-W", "ignore", "-B", "-u", "-c", code)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert "loud" in run("-c", code).stderr
    assert run("-q").returncode == 1, "what it does not know is said, not ignored"


def test_where_the_plug_in_must_not_be_or_all_is_to_be_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "pass"]
    assert warm.ready(command, {"MEGATRON_NPU_AUTOLOAD": "0"})[0] == command
    monkeypatch.setenv("TEST_COLD", "1")
    assert warm.ready(command, {})[0] == command


def test_a_plain_one_has_torch_and_no_plug_in() -> None:
    names = "('torch', 'transformers', 'megatron_npu')"
    code = f"import sys; print(*(name in sys.modules for name in {names}))"
    command, env = warm.plain([sys.executable, "-c", code], tiny.environment(), ("transformers",))
    done = processes.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True True False\n"


def test_all_processes_of_a_run_have_the_same_parents() -> None:
    command = [sys.executable, "-c", "pass"]
    code = f"from tests.support import tiny, warm; print(warm.ready({command}, tiny.environment())[0][0])"
    assert run("-c", code).stdout == warm.ready(command, tiny.environment())[0][0] + "\n"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of parents of this test alone, which import next to nothing."""
    folder = Path(
        tempfile.mkdtemp(prefix="warm-")
    )  # under pytest's the addresses of sockets would be too long
    (folder / "owner").write_text(str(os.getpid()))
    monkeypatch.setattr(parents, "home", lambda: folder)
    yield folder
    parents._end_all(folder, os.getpid())


def start(mark: str) -> Path:
    """Return the folder of a parent."""
    return Path(parents.program(["json"], {"MARK": mark}, os.environ)).parent


def test_a_parent_does_not_end_while_a_fork_runs(home: Path) -> None:
    folder = start("a")
    fork = subprocess.Popen([folder / "python", "-c", WAITING], stdout=subprocess.PIPE)
    assert fork.stdout is not None
    assert fork.stdout.readline()
    assert not parents.end(folder)
    fork.kill()
    fork.wait()
    wait_until(lambda: parents.end(folder))
    assert not folder.exists()


def test_the_idle_one_makes_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents, "MOST", 2)
    first, second, third = start("a"), start("b"), start("c")
    assert len(parents.numbers()) == 3, "none has been idle for long"
    monkeypatch.setattr(parents, "IDLE", 0)
    assert start("a") == first, "is used again"
    start("d")
    assert [folder.exists() for folder in (first, second, third)] == [True, False, False]
    assert start("b") == second, "starts again"


SEEN = "import os, sys; print(os.environ.get('MARK'), 'csv' in sys.modules, 'fractions' in sys.modules)"


def test_a_parent_forks_another_with_further_imports(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = parents.program(["json", "csv"], {}, os.environ)
    env = {**os.environ, "MARK": "b"}
    imports = ["json", "csv", "fractions?", "json.no_such?"]
    program = parents.program(imports, {"MARK": "b"}, env, base=base)
    for each, said in ((base, "None True False"), (program, "b True True")):
        done = processes.run([each, "-c", SEEN], env=env if each == program else None, stdout=-1, text=True)
        assert done.stdout == f"{said}\n"
    first, second = parents.numbers()
    assert {psutil.Process(number).ppid() for number in (first, second)} & {first, second}
    monkeypatch.setattr(parents, "MOST", 1)
    monkeypatch.setattr(parents, "IDLE", 0)
    start("c")
    assert Path(base).exists(), "it is not ended to make room"
    assert not Path(program).exists()
    assert "ModuleNotFoundError" in refused(["json.no_such"])


def refused(imports: list[str]) -> str:
    """Return what is said where a parent cannot be."""
    with pytest.raises(RuntimeError) as error:
        parents.program(imports, {}, os.environ)
    return str(error.value)


def test_parents_end_with_whoever_made_their_folder() -> None:
    """However that ends."""
    code = "import os; from tests.support.warm import parents as p; print(p.home())"
    code += "; print(p.program(['json'], {}, os.environ), flush=True); os.kill(os.getpid(), 9)"
    env = {name: value for name, value in tiny.environment().items() if name != "TEST_WARM_HOME"}
    done = processes.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    folder, program = map(Path, done.stdout.split())
    assert program.parents[1] == folder
    assert folder != parents.home()
    wait_until(lambda: not folder.exists())
