"""The house rule: imports point downward only. Read from the sources, nothing is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_npu"

# what stands above the adaptors: the wiring, the commands and the tools
WIRING = ["megatron_npu.plugin", "megatron_npu.runner", "megatron_npu.patch_commands", "megatron_npu.cli"]
TOOLS = [
    "megatron_npu.training",
    "megatron_npu.preprocessing",
    "megatron_npu.evaluation",
    "megatron_npu.conversion",
    "megatron_npu.doctor",
    "megatron_npu.sim",
]
ABOVE_ADAPTORS = [*WIRING, *TOOLS]
ROOMS_OF_TORCH = ["megatron_npu.devices", "megatron_npu.ops", "megatron_npu.adaptors"]
ENTRANCES = ["megatron_npu.cli", "megatron_npu.runner", "megatron_npu.doctor", "megatron_npu.sim"]

# room -> what its files may import, by first two dotted parts or by top-level name
FORBIDDEN = {
    "patching": [
        "megatron",
        "torch",
        "torch_npu",
        "megatron_npu.adaptors",
        "megatron_npu.ops",
        "megatron_npu.devices",
        "megatron_npu.settings",
        *ABOVE_ADAPTORS,
    ],
    "devices": [
        "megatron",
        "megatron_npu.ops",
        "megatron_npu.adaptors",
        "megatron_npu.patching",
        *ABOVE_ADAPTORS,
    ],
    "ops": ["megatron", "megatron_npu.adaptors", "megatron_npu.patching", *ABOVE_ADAPTORS],
    "standins": ["megatron", "megatron_npu.adaptors", "megatron_npu.patching", *ABOVE_ADAPTORS],
    "adaptors": ["torch_npu", *ABOVE_ADAPTORS],
    "training": [
        "torch_npu",
        "megatron_npu.adaptors",
        "megatron_npu.patching",
        "megatron_npu.evaluation",
        "megatron_npu.conversion",
        *ENTRANCES,
    ],
    "tokenization": ["torch", "megatron", "megatron_npu.adaptors", "megatron_npu.ops", *ABOVE_ADAPTORS],
    "preprocessing": [
        "megatron",
        "torch",
        "megatron_npu.plugin",
        "megatron_npu.training",
        "megatron_npu.evaluation",
        "megatron_npu.conversion",
        *ENTRANCES,
    ],
    "evaluation": [
        "torch_npu",
        "megatron_npu.adaptors",
        "megatron_npu.patching",
        "megatron_npu.conversion",
        *ENTRANCES,
    ],
    "conversion": ["torch_npu", "megatron_npu.adaptors", "megatron_npu.patching", *ENTRANCES],
    "doctor": [
        "megatron",
        "megatron_npu.adaptors",
        "megatron_npu.cli",
        "megatron_npu.training",
        "megatron_npu.evaluation",
        "megatron_npu.conversion",
        "megatron_npu.preprocessing",
        "megatron_npu.sim",
    ],
    # it imitates the device under the plug-in, so it must not lean on what it serves to test
    "sim": [
        "megatron",
        "megatron_npu.patching",
        "megatron_npu.devices",
        "megatron_npu.ops",
        "megatron_npu.standins",
        "megatron_npu.adaptors",
        *WIRING,
        *(tool for tool in TOOLS if tool != "megatron_npu.sim"),
    ],
    "files.py": ["torch", "megatron", "megatron_npu"],
    "settings.py": ["torch", "megatron", *ROOMS_OF_TORCH, *ABOVE_ADAPTORS],
    "attention_flags.py": ["torch", "megatron", *ROOMS_OF_TORCH, *ABOVE_ADAPTORS],
    "upstream.py": ["torch", "megatron", "megatron_npu.adaptors", *ABOVE_ADAPTORS],
    "plugin.py": ["torch", "megatron", "megatron_npu.runner", "megatron_npu.patch_commands", *TOOLS],
    "runner.py": ["torch", "megatron", "megatron_npu.adaptors", *TOOLS],
    "patch_commands.py": ["torch", "megatron", "megatron_npu.cli", *TOOLS],
}


def imports(file: Path) -> set[str]:
    """Return the full names that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_folder_has_its_rule():
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} <= FORBIDDEN.keys()


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_point_downward(room):
    place = PACKAGE / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            for forbidden in FORBIDDEN[room]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{file} imports {name}"


def test_patching_imports_nothing_of_the_rest_but_files():
    allowed = ("megatron_npu.patching.", "megatron_npu.files.")
    for file in (PACKAGE / "patching").rglob("*.py"):
        for name in imports(file):
            if name.partition(".")[0] == "megatron_npu":
                assert f"{name}.".startswith(allowed), f"{file} imports {name}"


def test_the_plug_in_imports_neither_torch_nor_megatron():
    code = "import sys, megatron_npu; print(sorted({'torch', 'megatron'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_environment_variables_are_read_in_one_place():
    for file in PACKAGE.rglob("*.py"):
        if file.name != "settings.py" and "sim" not in file.parts:
            source = file.read_text(encoding="utf-8")
            for call in ("environ.get", "getenv"):
                assert f'{call}("MEGATRON_NPU' not in source, file
