"""Collect everything that `make gpu` needs on a machine with a GPU and torch, but no network.

    python scripts/gpu_package.py .gpu --python 3.12
    # copy this repository with .gpu to the machine, then there, in its root:
    source .gpu/start.sh && python3 benchmarks/gpu_day.py --together

FOLDER gets wheels for that Python (megatron-core and what its scripts import besides torch, Transformers and
their requirements) and the trees whose stock scripts run, without their tests and documentation. ``start.sh``
installs the wheels separately from the machine's own packages and moves the trees into place.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = (
    *("megatron-core==0.16.1", "liger-kernel", "pydantic", "annotated-types", "typing-inspection", "six"),
    *("xxhash", "psutil", "einops"),
)
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2_5")  # manylinux_*_x86_64: pip takes each by its exact name
TREES = ("core_v0.16.1", "285068c8")
LEFT_OUT = ("tests", "docs", "examples", "images", "uv.lock", ".git", ".github", "__pycache__")
START = """# source it in the root of the repository: what the machine lacks, beside its own packages
python3 -m pip install -q --no-index --no-deps --upgrade --target {folder}/site {folder}/wheels/*.whl
mkdir -p checkouts && cp -r {folder}/checkouts/. checkouts/
export PYTHONPATH="$PWD:$PWD/{folder}/site:${{PYTHONPATH:-}}"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the folder; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="folder in this repository to write to; created if it does not exist"
    )
    parser.add_argument(
        "--python", default="3.12", metavar="X.Y", help="Python version of the machine (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    for name in WHEELS:
        subprocess.run(download(name, folder / "wheels", arguments.python), check=True)
    # pydantic takes one version of its core alone
    core = pinned(folder / "wheels", "pydantic-core")
    subprocess.run(download(core, folder / "wheels", arguments.python), check=True)
    copied = [name for name in TREES if copy_tree(ROOT / "checkouts" / name, folder / "checkouts" / name)]
    (folder / "start.sh").write_text(START.format(folder=folder))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"gpu_package: {folder}: {size / 2**20:.0f} MiB, trees: {', '.join(copied) or 'none'}")
    return 0


def download(requirement: str, folder: Path, python: str) -> list[str]:
    """Return the command that downloads one wheel, without its requirements."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for each in PLATFORMS:
        command += ["--platform", f"manylinux_{each}_x86_64"]
    return [*command, "--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64", requirement]


def pinned(folder: Path, requirement: str) -> str:
    """Return the requirement with the version that pydantic's wheel in the folder requires.

    Raises:
        ValueError: the wheel requires no exact version.
    """
    import email
    import zipfile

    wheel = next(folder.glob("pydantic-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        wanted = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    for line in wanted:
        if line.startswith(f"{requirement}=="):
            return line.partition(";")[0].strip()
    raise ValueError(f"{wheel.name} does not require a version of {requirement}")


def copy_tree(source: Path, target: Path) -> bool:
    """Copy the files that a tree's scripts need; return True if the tree exists."""
    if not source.is_dir():
        return False
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=left_out(source))
    return True


def left_out(source: Path):  # type: ignore[no-untyped-def]  # shutil's own type has no name
    """Return an ignore function for ``copytree`` that skips unneeded names at the top, and all bytecode."""

    def names(folder: str, inside: list[str]) -> set[str]:
        unwanted = LEFT_OUT if Path(folder) == source else ("__pycache__",)
        return set(unwanted) & set(inside)

    return names


if __name__ == "__main__":
    sys.exit(main())
