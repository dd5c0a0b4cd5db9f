"""The documentation is true: links lead somewhere, names exist, and the worked examples run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import io
import re
import sys
from pathlib import Path

import pytest

import megatron_npu
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.options import attention_flags
from megatron_npu.upstream import megatrons
from tests.support import processes, tiny, warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CHANGELOG.md", "patches/README.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(TEXTS.values())

BLOCK = re.compile(
    r"(?:<!-- from: (?P<source>\S+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```", re.M | re.S
)
PATHS = re.compile(r"`((?:megatron_npu|tests|docs|scripts|benchmarks|tests_gpt|patches|demo)/[\w./-]+)`")
FLAGS = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[re.Match[str]]:
    return [block for block in BLOCK.finditer(TEXTS[page]) if block["language"] == language]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_code_can_be_parsed(page):
    for block in blocks(page, "python"):
        ast.parse(block["text"], filename=page_id(page))


# -- links ------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", TEXTS[page])):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_id(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page_id(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page):
    for path in PATHS.findall(TEXTS[page].replace("`tests/unit_tests`", "")):  # Megatron-LM's own
        assert (ROOT / path).exists(), f"{page_id(page)} names {path}"


def test_the_index_lists_every_page():
    index = TEXTS[ROOT / "docs" / "README.md"]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"]({name})" in index, f"docs/README.md does not list {name}"


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("megatron_lm", "internals/patches-megatron-lm.md"),
        ("megatron_lm", "internals/guide-functions.md"),  # those that the guide lists
        ("megatron_core", "internals/patches-megatron-core.md"),
        ("megatron_deepspeed", "internals/patches-megatron-deepspeed.md"),
        ("megatron_deepspeed_core", "internals/patches-megatron-deepspeed-core.md"),
    ],
)
def test_the_page_lists_every_patch(name, page):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "patch_table.py"),
        name,
        str(ROOT / "docs" / page),
        "--check",
    ]
    done = warm.run(command, env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"run it without --check: {done.stderr}"


@pytest.mark.parametrize(
    "script",
    (
        "addresses bench_page benchmark_tables command_flags convergence_page equal_numbers_page gpu_page "
        "house_page known_bugs machines_page main_numbers_page operation_table pretrain_flags rooms "
        "simulator_kernels stock_flags switch_table"
    ).split(),
)
def test_the_generated_page_is_up_to_date(script):
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "--check"]
    done = warm.run(command, env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/{script}.py without --check: {done.stderr}"


def test_an_address_without_a_purpose_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    addresses = importlib.import_module("addresses")
    monkeypatch.setattr(addresses, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("See https://github.com/NVIDIA/Megatron-LM, http://127.0.0.1:80/ and a@example.org.")
    named = ("docs/page.md", "https://github.com/NVIDIA/Megatron-LM", "code of Megatron-LM, for cloning")
    assert list(addresses.rows()) == [named]
    page.write_text("See https:" + "//somewhere.else.org/page.")
    with pytest.raises(ValueError, match=r"somewhere\.else\.org/page in .*page.md has no purpose"):
        list(addresses.rows())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("Accounts", ["not root"]),
        ("Permissions", ["umask 027", "640", "750", "440"]),
        ("Network", ["MASTER_PORT", "GLOO_SOCKET_IFNAME", "HCCL_IF_IP", "run_text_generation_server.py"]),
    ],
)
def test_the_page_of_security_advises(section, said):
    page = TEXTS[ROOT / "docs" / "reference" / "security.md"]
    text = re.search(rf"^## {section}\n(.*?)(?=^## )", page, re.M | re.S)[1]
    for words in said:
        assert words in text, words


def test_what_to_do_without_rdma_is_named():
    page = TEXTS[ROOT / "docs" / "how-to" / "troubleshooting.md"]
    assert "NCCL_IB_DISABLE=1" in re.search(r"^## 5\. .*?(?=^## 6)", page, re.M | re.S)[0]


def test_the_newest_entry_of_the_change_log_is_this_version():
    heading = re.search(r"^## \[(.+?)\]", TEXTS[ROOT / "CHANGELOG.md"], re.M)
    assert heading[1] == megatron_npu.__version__
    assert "](CHANGELOG.md)" in TEXTS[ROOT / "README.md"]


def test_every_operation_has_a_row():
    """Imported elsewhere: what tests bind in this process must not be bound here."""
    code = """if True:
        import importlib, pkgutil
        from megatron_npu import ops
        for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
            if ".triton.kernels." not in module.name:  # they need triton
                importlib.import_module(module.name)
        print(*(operation.name for operation in ops.dispatch.OPERATIONS))"""
    command = [sys.executable, "-c", code]
    done = warm.run(command, env=tiny.environment(), capture_output=True, text=True, check=True)
    rows = re.findall(r"^\| (`.*?) \|", TEXTS[ROOT / "docs" / "reference" / "operations.md"], re.M)
    named = {part for row in rows for name in re.findall(r"`([\w.*]+)`", row) for part in name.split(".")}
    named |= {"attention"}  # has a page of its own
    assert len(done.stdout.split()) > 10
    assert set(done.stdout.split()) <= named


# -- commands, flags, variables ---------------------------------------------------------------------


@functools.cache
def help_text(*command: str) -> str:
    """Return what ``megatron-npu COMMAND --help`` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return out.getvalue()


def test_commands_that_are_named_exist():
    named = set(re.findall(r"(?:megatron-npu|-m megatron_npu) ([a-z]+)\b", EVERYTHING))
    assert named <= set(cli.COMMANDS)


def test_every_command_is_named():
    for name in cli.COMMANDS:
        assert f"megatron-npu {name}" in TEXTS[ROOT / "README.md"], f"README.md does not name {name}"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_helps(command):
    assert help_text(command).startswith("usage: ")


def command_lines() -> list[tuple[str, str]]:
    """Return every command line of ours in a code block or in backquotes: (its command, the whole line)."""
    found = []
    for text in TEXTS.values():
        code = [block["text"].replace("\\\n", " ") for block in BLOCK.finditer(text)]
        lines = [line for block in code for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
        for line in lines:
            # behind another command of ours (sim -- megatron-npu …) a new one begins
            for part in re.split(r"(?=\bmegatron-npu |-m megatron_npu )", line)[1:]:
                match = re.match(r"(?:megatron-npu|-m megatron_npu) ([a-z]+)\b(.*)", part)
                if match:
                    found.append((match[1], match[2].partition("#")[0]))
    return found


def test_flags_behind_our_commands_exist():
    assert len(command_lines()) > 30
    for command, arguments in command_lines():
        if command in ("run", "sim", "evaluate"):  # what follows is another program's
            continue
        own = arguments.partition(" -- ")[0]  # behind it stands a command of which plan has no part
        words = [command, *own.split()[:1]] if command == "patches" else [command]
        for flag in FLAGS.findall(own):
            assert flag in FLAGS.findall(help_text(*words)), f"megatron-npu {' '.join(words)} has no {flag}"


def test_variables_that_are_named_exist():
    known = {variable.name for variable in settings.VARIABLES}
    named = set(re.findall(r"\b(?:MEGATRON_NPU_[A-Z_]+[A-Z]|MEGATRON_LM_PATH)\b", EVERYTHING))
    assert named <= known


@pytest.mark.parametrize("variable", settings.VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_is_documented(variable):
    assert f"`{variable.name}`" in EVERYTHING


def test_every_flag_of_ours_is_documented():
    parser = argparse.ArgumentParser(add_help=False)
    attention_flags.add_attention_flags(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert {"--pre-tockens", "--next-tockens", "--shape-order"} <= set(flags)
    assert set(flags) <= set(FLAGS.findall(TEXTS[ROOT / "docs" / "reference" / "flags.md"]))


# -- the worked examples ----------------------------------------------------------------------------

GUIDE = ROOT / "docs" / "contributing" / "writing-an-adaptor.md"
OPERATION = ROOT / "docs" / "contributing" / "adding-an-operation.md"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_quoted_code_is_what_the_file_says(page):
    for block in BLOCK.finditer(TEXTS[page]):
        if block["source"]:
            assert block["text"] in (ROOT / block["source"]).read_text(encoding="utf-8"), block["source"]


def test_the_worked_adaptor_runs(tmp_path):
    try:
        megatrons.find()
    except UsageError:
        pytest.skip("no Megatron is installed")
    steps = [block["text"] for block in blocks(GUIDE, "python") if not block["source"]]
    assert len(steps) == 4
    script = tmp_path / "guide.py"
    script.write_text("\n".join(steps) + "\nprint('to the end')\n")
    done = processes.run(
        [sys.executable, str(script)], env=tiny.environment(), capture_output=True, text=True
    )
    assert done.stdout.endswith("to the end\n"), done.stderr


CHECKED_OPERATION = """
x = torch.randn(4, 2, 8, requires_grad=True)
torch.testing.assert_close(squared_relu(x), _reference(x))
assert _squared_relu.implementations.keys() == {"cpu", "cuda", "npu"}
assert "float64" in _beyond_npu(x.double())
_example(lambda *shape: torch.randn(shape, requires_grad=True)).sum().backward()
print("to the end")
"""


def test_the_worked_operation_runs(tmp_path):
    (block,) = blocks(OPERATION, "python")
    script = tmp_path / "squared_relu.py"
    script.write_text(block["text"] + CHECKED_OPERATION)
    done = warm.run([sys.executable, str(script)], env=tiny.environment(), capture_output=True, text=True)
    assert done.stdout == "to the end\n", done.stderr


def test_the_table_of_tests_names_every_folder() -> None:
    page = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/.]+)` \|", page.partition("| in `tests/` |")[2], re.M))
    tests = ROOT / "tests"
    assert [name for name in named if not (tests / name).exists()] == []
    folders = {path.name for path in tests.iterdir() if (path / "__init__.py").exists()}
    assert folders - {name.partition("/")[0] for name in named} == set()
