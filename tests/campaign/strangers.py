"""Our commands among strangers' files: another account's working directory and caches; what of them is run?

python -m tests.campaign.strangers: as root, or as any user (then nothing is another account's, and only modes
differ). Each module that a command may import lies in the working directory and leaves a mark; so does each
library and each pickle in the caches.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign.outcomes import Outcome, last_line, main
from tests.support import processes, tiny
from tests.support.payload import Runs

STRANGER = 65_534  # the user nobody
_TRAIN = "--epochs 1 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --train-iters 2 --no-plot"
_SCRIPT = tiny.ROOT / "tests/finetune/scripts/dropout.py"
_BENCH = "--model bert-tiny --devices 1 --steps 1 --repeat 1 --seq-length 16"
_PLAIN = ("TORCHINDUCTOR_", "ATEN_CPU_CAPABILITY")  # settings of the suite that a user does not have
_ABSENT = (
    "wandb lm_eval triton apex amp_C transformer_engine flash_attn tensorboard deepspeed sentencepiece"
    " tiktoken causal_conv1d mamba_ssm torch_npu mindspeed sitecustomize usercustomize zarr onnx"
)
_MARKS = "import os\nos.close(os.open({!r}, os.O_CREAT | os.O_WRONLY))\n"


def commands(place: Path) -> dict[str, list[str]]:
    """Return the commands that are tried, with results under ``place``; the first makes a checkpoint."""
    data = tiny.write_dataset(place / "text", documents=40)
    flags = [*tiny.flags_for(data), "--train-iters", "2"]
    flags[flags.index("--no-plot")] = "--async-save"  # with a picture
    saved = str(place / "saved")
    train = ["train", "--user-script", str(_SCRIPT), *_TRAIN.split(), "--save", str(place / "own")]
    return {
        "pretrain": ["pretrain", *flags, "--num-workers", "1", "--dashboard", "0", "--save", saved],
        "train": [*train, "--nproc-per-node", "2"],
        "train --graph-optimization": [*train[:-1], str(place / "graph"), "--graph-optimization"],
        "generate": ["generate", "--load", saved, "--prompt", "1", "--num-tokens", "2"],
        "convert": [
            "convert",
            "--from",
            "megatron",
            "--to",
            "hf",
            saved,
            str(place / "hf"),
            "--proof",
            "tensors",
        ],
        "checkpoint": ["checkpoint", "verify", saved],
        "doctor": ["doctor", "--json"],
        "lambada": ["lambada", "--load", saved, "--valid-data", _passages(place)],
        "data": ["data", "inspect", str(data)],
        "plan": ["plan", "--devices", "2", "--device", "cuda", "--", "pretrain", *tiny.flags_for(data)],
        "bench --suite graph": ["bench", "--suite", "graph", *_BENCH.split()],
    }


def _passages(place: Path) -> str:
    path = place / "passages.jsonl"
    path.write_text('{"text": "1 2 3 4 5"}\n' * 4)
    return str(path)


def trials(place: Path, chance: random.Random, only: set[str] | None = None) -> Iterator[Outcome]:
    """Run each command in a stranger's folder, then with each hostile cache; ``only``: these commands."""
    folder = hostile(place / "stranger", place / "MARK")
    found = {name: words for name, words in commands(place).items() if only is None or name in only}
    home = place / "cache"
    for name, argv in found.items():
        yield _tried(place, name, argv, "in a stranger's folder", folder, home)
    for name, spoil in CACHES.items():
        for command in [each for each in ("pretrain", "train --graph-optimization") if each in found]:
            shutil.rmtree(place / "saved", ignore_errors=True)
            shutil.rmtree(place / "graph", ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=place) as own:
                if home.exists():
                    shutil.copytree(home, own, dirs_exist_ok=True)
                spoil(Path(own), place / "MARK")
                yield _tried(place, command, found[command], name, place, Path(own))


def _tried(place: Path, name: str, argv: list[str], how: str, folder: Path, home: Path) -> Outcome:
    program = Path(sys.executable).with_name("megatron-npu")
    start = [str(program)] if program.exists() else [sys.executable, "-P", "-m", "megatron_npu"]
    temporary = home.with_name("tmp")
    temporary.mkdir(exist_ok=True)
    env = tiny.environment() | {"XDG_CACHE_HOME": str(home), "TMPDIR": str(temporary)}
    env = {variable: value for variable, value in env.items() if not variable.startswith(_PLAIN)}
    limit = 4 * processes.LONGEST  # of what compiles on a busy machine
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": limit}
    done = processes.run([*start, *argv], **options)
    mark = place / "MARK"
    if mark.exists():
        mark.unlink()
        return Outcome(name, how, "")
    if "Traceback" in done.stderr:
        return Outcome(name, how, "")
    refused = f"refused: {last_line(done.stderr)}" if done.returncode else "nothing was run"
    return Outcome(name, how, refused)


def hostile(folder: Path, mark: Path) -> Path:
    """Make a working directory of whose modules each leaves a mark where it is imported."""
    folder.mkdir()
    names = {*sys.stdlib_module_names, *_ABSENT.split()} - {"__main__"}
    for each in importlib.metadata.distributions():
        names |= {name for name in (each.read_text("top_level.txt") or "").split() if name.isidentifier()}
    for name in names - {"megatron_npu"}:
        (folder / f"{name}.py").write_text(_MARKS.format(str(mark)))
    (folder / "matplotlibrc").write_text("backend: module://evil\n")
    (folder / "evil.py").write_text(_MARKS.format(str(mark)))
    _give_away(folder)
    return folder


def _give_away(folder: Path) -> None:
    """Let a stranger own a folder and all in it, if this is the superuser."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def _library(mark: Path, target: Path) -> None:
    """Compile a library that leaves a mark where it is loaded."""
    source = target.with_suffix(".c")
    source.write_text(
        "#include <fcntl.h>\n__attribute__((constructor)) static void mark(void) "
        f'{{ open("{mark}", O_CREAT | O_WRONLY, 0644); }}\n'
    )
    processes.run(["cc", "-shared", "-fPIC", "-o", target, source], check=True)
    source.unlink()


def _spoiled(home: Path, mark: Path) -> None:
    """Put a stranger's libraries and pickles in the place of all that there are."""
    for folder in ("kernels", "inductor", "datasets"):
        (home / "megatron_npu" / folder).mkdir(parents=True, exist_ok=True)
    for path in [path for path in home.rglob("*") if path.is_file()]:
        if path.suffix == ".so":
            path.unlink()
            _library(mark, path)
        elif path.suffix != ".lock":
            path.write_bytes(pickle.dumps(Runs(mark)))


def _strangers_folder(home: Path, mark: Path) -> None:
    _spoiled(home, mark)
    for name in ("kernels", "inductor", "datasets"):
        _give_away(home / "megatron_npu" / name)
    if os.geteuid():
        _open_folder(home, mark)


def _open_folder(home: Path, mark: Path) -> None:
    _spoiled(home, mark)
    for name in ("kernels", "inductor", "datasets"):
        (home / "megatron_npu" / name).chmod(0o777)


def _strangers_files(home: Path, mark: Path) -> None:
    """Give the files away alone; the folder stays the user's."""
    _spoiled(home, mark)
    for path in [path for path in (home / "megatron_npu" / "kernels").iterdir() if path.is_file()]:
        path.chmod(0o666)
        if os.geteuid() == 0:
            os.chown(path, STRANGER, STRANGER)


def _in_tmp(home: Path, mark: Path) -> None:
    """Make torch's own folder of graphs before the user does."""
    import getpass

    folder = home.with_name("tmp") / f"torchinductor_{getpass.getuser()}"
    shutil.rmtree(folder, ignore_errors=True)
    if (home / "megatron_npu" / "inductor").exists():
        shutil.copytree(home / "megatron_npu" / "inductor", folder)
        shutil.rmtree(home / "megatron_npu" / "inductor")
    folder.mkdir(parents=True, exist_ok=True)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.write_bytes(pickle.dumps(Runs(mark)))
    _give_away(folder)


CACHES: dict[str, Callable[[Path, Path], None]] = {
    "caches of another account": _strangers_folder,
    "caches that others may write to": _open_folder,
    "another account's files in a cache": _strangers_files,
    "torch's folder of graphs made by another": _in_tmp,
}


if __name__ == "__main__":
    sys.exit(main(trials, __doc__))
