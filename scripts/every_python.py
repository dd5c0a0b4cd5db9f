"""Test the project without torch with every supported Python on this machine: every_python.py [VERSION ...]

Each Python gets a separate environment and runs: import, doctor, check of a Megatron tree (if checkouts/ has
one) and the unit tests that need no torch. Tests that need torch are counted, not run, because torch for all
these Pythons takes gigabytes. The exit code is 1 if anything fails, 2 if a requested Python is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
MINORS = ("3.10", "3.11", "3.12", "3.13")
PLACE = ROOT / "runs" / "pythons"  # where the environments are kept
NEEDED = ("hypothesis", "pytest", "setuptools>=77")  # by the tests, beside what the package itself declares
# These run torch or Megatron in another process, whose words are not in their failure.
HIDDEN = (
    "test_bytes_of_the_stock_tool",
    "test_every_operation_has_a_row",
    "test_processes_that_are_alone_do_not_meet",
)
# torch, what needs it, and what the tests themselves need
ABSENT = re.compile(
    r"No module named '(torch|megatron|setuptools|peft|transformers|datasets)\b|torch is not installed"
    r"|no Megatron on the Python path"
)
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "tests/unit")


def interpreter(minor: str) -> str | None:
    """Return a Python of this version, installed next to this Python (as by pyenv and uv) or on the path."""
    if minor == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*{minor}.*/bin/python"))
    return str(beside[-1]) if beside else shutil.which(f"python{minor}")


def environment(python: str, minor: str) -> str:
    """Create an environment that contains the project but not torch, and return the environment's Python."""
    place = PLACE / minor
    made = str(place / "bin" / "python")
    if not Path(made).is_file():
        subprocess.run([python, "-m", "venv", str(place)], check=True)
    install = [made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--editable", str(ROOT), *NEEDED], check=True)
    return made


def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python`` in the project's folder, without the variables of the calling environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRON", "PYTHON"))}
    return subprocess.run(
        [python, *arguments], cwd=ROOT, env=kept, capture_output=True, text=True, check=False
    )


def unit_tests(python: str) -> tuple[bool, str]:
    """Run the tests that need neither torch nor another missing package; return True if they pass."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        done = run(python, *TESTS, f"--junitxml={report}")
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    outcomes = Counter(child.tag for case in cases for child in case)
    lacking: Counter[str] = Counter()
    failed = []
    for case in cases:
        for child in case:
            if child.tag not in ("failure", "error"):
                continue
            absent = ABSENT.search(f"{child.text} {case.findtext('system-err')}")
            if absent or str(case.get("name")).startswith(HIDDEN):
                lacking[(absent and absent[1]) or "torch"] += 1
            else:
                last = (child.text or "").strip().splitlines()[-4:]
                failed.append("\n".join([f"{case.get('classname')}::{case.get('name')}", *last]))
    wanting = ", ".join(f"{count} for want of {name}" for name, count in lacking.items())
    passed = len(cases) - sum(outcomes.values())
    text = (
        f"{passed} passed, {outcomes['skipped']} skipped, {wanting} not run to an end, {len(failed)} failed"
    )
    if not cases:
        return False, (done.stdout + done.stderr)[-3000:]
    return not failed, "\n".join([text, *failed])


def steps(python: str) -> dict[str, tuple[bool, str]]:
    """Test one Python; return True if everything passed, and the output."""
    found = {}
    done = run(python, "-c", "import megatron_npu; print(megatron_npu.__version__)")
    found["import"] = done.returncode == 0, done.stdout.strip() or done.stderr
    done = run(python, "-m", "megatron_npu", "doctor", "--quick")
    told = "torch is not installed" in done.stdout and done.returncode == 1
    found["doctor"] = told, "says that torch is not installed" if told else done.stdout + done.stderr
    trees = sorted((ROOT / "checkouts").glob("*core*")) if (ROOT / "checkouts").is_dir() else []
    for tree in trees[-1:]:
        done = run(python, "-m", "megatron_npu", "check", "--megatron", str(tree))
        found[f"check {tree.name}"] = done.returncode == 0, (done.stdout.strip() or done.stderr)[-300:]
    found["unit tests"] = unit_tests(python)
    return found


def main(asked: list[str]) -> int:
    """Test each Python; print a line for each step."""
    well = True
    for minor in asked or MINORS:
        python = interpreter(minor)
        if python is None:
            print(f"{minor}: not on this machine")
            well = well and not asked
            continue
        for name, (passed, said) in steps(environment(python, minor)).items():
            print(f"{minor}: {name}: {'ok' if passed else 'FAILED'}: {said}", flush=True)
            well = well and passed
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
