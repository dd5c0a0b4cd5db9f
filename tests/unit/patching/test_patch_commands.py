"""The commands on real Megatron sources: a copy of the installed megatron-core, edited."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from megatron_npu import plugin
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.commands import patches as patch_commands
from megatron_npu.patching.pins import Pins
from megatron_npu.upstream import megatrons
from tests.support import processes, warm


@pytest.fixture(scope="module")
def found() -> megatrons.Upstream:
    try:
        return megatrons.find()
    except UsageError:
        pytest.skip("no Megatron is installed")


@pytest.fixture(scope="module")
def modules(found: megatrons.Upstream) -> list[Path]:
    """The files of the patched modules of the installed Megatron, in its folder."""
    patches = patch_commands._shipped(patch_commands._records(found), found)
    files = {found.root / "megatron/core/package_info.py"}
    for module in {patch.module for patch in patches}:
        base = found.root.joinpath(*module.split("."))
        files.add(base / "__init__.py" if base.is_dir() else base.with_suffix(".py"))
    return [path.relative_to(found.root) for path in files]


def copied(found: megatrons.Upstream, modules: list[Path], folder: Path) -> Path:
    for path in modules:
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found.root / path, copy)
    return folder


@pytest.fixture
def tree(found: megatrons.Upstream, modules: list[Path], tmp_path: Path) -> Path:
    """The patched modules of the installed Megatron, nothing else."""
    return copied(found, modules, tmp_path / "tree")


@pytest.fixture(scope="module")
def made_pins(
    found: megatrons.Upstream, modules: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Pins of those modules as they are, which take a second to make."""
    folder = tmp_path_factory.mktemp("pinned")
    tree, directory = copied(found, modules, folder / "tree"), folder / "pins"
    assert patch_commands.pin(["--megatron", str(tree), "--output", str(directory)]) == 0
    assert [path.suffix for path in directory.iterdir()] == [".json"]  # and no partial file
    return directory


@pytest.fixture
def pins(
    tree: Path,
    made_pins: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> Path:
    """Pins of ``tree`` as it is."""
    directory = Path(shutil.copytree(made_pins, tmp_path / "pins"))
    capsys.readouterr()
    monkeypatch.setattr(plugin, "pins_directory", lambda: directory)
    return directory


def edit(tree: Path, old: str, new: str) -> None:
    path = tree / "megatron/core/tensor_parallel/random.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def check(tree: Path, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, dict]:
    code = patch_commands.check(["--megatron", str(tree), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_unchanged(tree: Path, pins: Path, capsys: pytest.CaptureFixture) -> None:
    code, report = check(tree, capsys)
    assert code == report["fails"] == 0
    assert set(report["counts"]) == {"same"}
    assert len(report["targets"]) >= 10


def test_a_changed_comment_is_the_same(tree: Path, pins: Path, capsys: pytest.CaptureFixture) -> None:
    edit(tree, "def _set_cuda_rng_state(", "# a remark\ndef _set_cuda_rng_state(")
    assert check(tree, capsys)[0] == 0


@pytest.mark.parametrize(
    ("new", "status"),
    [
        ("def _set_cuda_rng_state(extra, ", "signature_changed"),
        ("def _set_cuda_rng_state_renamed(", "gone"),
    ],
)
def test_drift(tree: Path, pins: Path, capsys: pytest.CaptureFixture, new: str, status: str) -> None:
    edit(tree, "def _set_cuda_rng_state(", new)
    code, report = check(tree, capsys)
    assert code == report["fails"] == 1
    (failing,) = [target for target in report["targets"] if target["fails"]]
    assert failing["status"] == status
    assert failing["file"].endswith("random.py")
    assert patch_commands.check(["--megatron", str(tree)]) == 1
    assert "FAILS" in capsys.readouterr().out


def test_the_text_says_what_was_compared_and_each_target_once(
    tree: Path, pins: Path, found: megatrons.Upstream, capsys: pytest.CaptureFixture
) -> None:
    edit(tree, "def _set_cuda_rng_state(", "def _set_cuda_rng_state(extra, ")
    assert patch_commands.check(["--megatron", str(tree)]) == 1
    _, compared, first, *lines, last = capsys.readouterr().out.splitlines()
    assert compared == f"compared with the pins of {found.version}"
    assert first == "FAILS  megatron.core.tensor_parallel.random:_set_cuda_rng_state"
    assert any(
        line.strip().startswith(f"replace, signature_changed against {found.version}") for line in lines
    )
    targets = [line for line in lines if line.startswith("ok ")]
    assert len(targets) == len(set(targets))
    assert last.startswith(f"{len(targets) + 1} targets: ")
    longest = max(len(target) for target in targets)
    assert all(len(line) <= max(longest, 100) or str(tree) in line for line in lines)


def test_a_version_without_pins_says_with_which_it_was_compared(
    tree: Path, pins: Path, found: megatrons.Upstream, capsys: pytest.CaptureFixture
) -> None:
    info = tree / "megatron/core/package_info.py"
    major, minor, patch = found.version.split(".")[:3]
    info.write_text(info.read_text().replace(f"PATCH = {patch}", "PATCH = 99"))
    assert patch_commands.check(["--megatron", str(tree)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{major}.{minor}.99 has no pins; compared with those of {found.version}"
    assert lines[2].endswith(f"(as in {found.version})")


def test_pins_are_compared_with_in_a_stated_order(pins: Path, found: megatrons.Upstream) -> None:
    (path,) = pins.iterdir()
    for version in ("0.9.0", "0.10.0"):
        content = json.loads(path.read_text()) | {"version": version}
        (pins / f"{found.name}-{version}.json").write_text(json.dumps(content))
    names = [file.version for file in Pins.load(pins, found.name, "0.9.0").files]
    assert names == ["0.9.0", found.version, "0.10.0"]


def test_the_ledger_of_a_drifted_tree_shows_what_failed_first(
    found: megatrons.Upstream, tmp_path: Path
) -> None:
    shutil.copytree(found.root / "megatron" / "core", tmp_path / "megatron" / "core")
    edit(tmp_path, "def _set_cuda_rng_state(", "def _set_cuda_rng_state(extra, ")
    modules = ["megatron.core.tensor_parallel.random", "megatron.core.tensor_parallel.cross_entropy"]
    command = [sys.executable, "-m", "megatron_npu", "ledger", "--megatron", str(tmp_path), "--import"]
    done = warm.run([*command, *modules], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    failed = "megatron.core.tensor_parallel.random:_set_cuda_rng_state"
    assert lines[1] == f"failed   replace  {failed}"
    assert sum(line.startswith("failed ") for line in lines) == 1
    assert f"1 failed ({failed})" in lines[-1]
    assert f"not imported: {failed} drifted; see the failed patches" in " ".join(" ".join(lines).split())
    assert len(lines) < len(patch_commands.verdicts(found))  # those that were not reached are told together


def test_a_removed_module_is_drift(tree: Path, pins: Path, capsys: pytest.CaptureFixture) -> None:
    (tree / "megatron/core/tensor_parallel/random.py").unlink()
    assert check(tree, capsys)[0] == 1


def test_it_is_static(tree: Path, pins: Path, capsys: pytest.CaptureFixture) -> None:
    loaded = {name for name in sys.modules if name.partition(".")[0] == "megatron"}
    check(tree, capsys)
    assert {name for name in sys.modules if name.partition(".")[0] == "megatron"} == loaded


def test_pins_of_modules_that_this_megatron_lacks_are_kept(
    tree: Path, pins: Path, found: megatrons.Upstream, capsys: pytest.CaptureFixture
) -> None:
    (path,) = pins.iterdir()
    data = json.loads(path.read_text())
    elsewhere = [patch for patch in patch_commands._records(found) if ".core." not in patch.target]
    target, module = elsewhere[0].target, elsewhere[0].module
    if module in data["modules"]:
        pytest.skip("the case: this Megatron ships the training scripts")
    data["targets"][target] = {"fingerprint": "0" * 16, "signature": "def f()", "line": 1}
    data["modules"][module] = "0" * 64
    path.write_text(json.dumps(data))
    assert patch_commands.pin(["--megatron", str(tree), "--output", str(pins)]) == 0
    assert Pins.load(pins, found.name).of(target)[found.version].signature == "def f()"


def test_static_ledger_shows_every_record_as_pending(
    found: megatrons.Upstream, capsys: pytest.CaptureFixture
) -> None:
    assert patch_commands.ledger(["--static", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts["pending"] == sum(counts.values()) >= 10


@pytest.mark.parametrize(
    ("action", "older"),
    [("list", "ledger"), ("check", "check"), ("pin", "pin")],
    ids=["list", "check", "pin"],
)
def test_actions_of_patches_are_the_older_commands(
    action: str, older: str, found: megatrons.Upstream, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = {"list": ["--static", "--json"], "check": ["--json"], "pin": ["--output", str(tmp_path)]}[action]
    printed = []
    for words in (["patches", action], [older]):
        assert cli.main([*words, *flags]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_an_unknown_action_of_patches_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["patches", "lst"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "must be list, check or pin, but got 'lst'" in error


def test_the_variable_names_the_megatron_where_no_flag_does(
    tree: Path, pins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tree))
    assert patch_commands.check(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["root"] == str(tree)
    assert report["pinned"] == [report["version"]]


def test_a_folder_that_cannot_be_written_is_one_line(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["pin", "--megatron", str(tree), "--output", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--output" in error


def test_a_reader_that_has_seen_enough_is_no_traceback(found: megatrons.Upstream) -> None:
    command = f"{sys.executable} -m megatron_npu check | head -c 1"
    done = processes.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["check", "pin", "ledger"])
def test_the_variable_that_names_no_folder_is_told(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", "/no/such/place")
    assert cli.main([command]) == 2
    assert "the folder /no/such/place (MEGATRON_LM_PATH) does not exist" in capsys.readouterr().err


def test_an_upstream_that_there_is_not_is_told_those_there_are(
    found: megatrons.Upstream, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["check", "--upstream", "rendezvous"]) == 2
    assert "megatron_core, megatron_lm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--megatron", "no/such/place"], ["--upstream", "no_such_upstream"]],
)
@pytest.mark.parametrize("command", ["check", "pin", "ledger"])
def test_bad_usage_is_one_line(
    found: megatrons.Upstream, command: str, arguments: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert cli.main([command, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert arguments[1] in error


def test_a_module_that_there_is_not_is_one_line(found: megatrons.Upstream) -> None:
    command = [sys.executable, "-m", "megatron_npu", "ledger", "--import", "megatron.core.nowhere"]
    done = warm.run(command, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no module megatron.core.nowhere" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
