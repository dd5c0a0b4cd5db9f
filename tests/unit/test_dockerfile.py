"""The Dockerfile, as far as it can be looked at without docker: what it copies is a whole package."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from pathlib import Path

from tests.conftest import ROOT
from tests.support import processes

# an instruction, its lines joined
INSTRUCTION = re.compile(r"^([A-Z]+) (.+)$", re.MULTILINE)


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    plain = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [match.groups() for line in plain if (match := INSTRUCTION.match(line))]
    assert len(found) == len(plain), "a line is no instruction"
    return found


def copied() -> list[str]:
    return [source for name, words in instructions() if name == "COPY" for source in words.split()[:-1]]


def test_instructions_are_known_and_in_order() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    assert names[:2] == ["ARG", "FROM"]
    assert names[-1] == "CMD"
    assert names.index("COPY") < len(names) - 1 - names[::-1].index("RUN"), "installed after it is copied"
    assert ("USER", "trainer") in instructions()


def test_the_context_is_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(copied())


def test_extras_exist() -> None:
    [install] = [words for name, words in instructions() if name == "RUN" and "pip install" in words]
    extras = re.search(r"\.\[([\w,]+)\]", install)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_pages_name_the_cores_that_the_extra_installs() -> None:
    """On Python 3.12 it is a newer one than on those before."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    new, old = re.findall(r'"megatron-core==([\d.]+); python_version', project)
    for page in ("how-to/containers.md", "reference/versions.md", "tutorials/quick-start-cpu.md"):
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        [said] = re.findall(
            r"(?:contains|installs|# with) megatron-core (.*?(?:otherwise|older|below Python))", text
        )
        assert set(re.findall(r"\b\d\.\d+\.\d+\b", said)) == {new, old}, page


def test_what_is_copied_installs(tmp_path: Path) -> None:
    place = tmp_path / "context"
    place.mkdir()
    for name in copied():
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    processes.run([*command, "--wheel-dir", str(tmp_path), str(place)], check=True)
    [wheel] = tmp_path.glob("megatron_npu-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "megatron_npu/commands/cli.py" in names
    assert {"megatron_npu_autoload.py", "rapidformer.py"} <= set(names)
    assert any(name.endswith("megatron_lm-285068c8.json") for name in names), "the pins are in the wheel"
