"""What pyproject.toml cannot say: the pin files go into the package, and the licence for any setuptools."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithPins(build_py):
    """Copies the pin files, which lie beside the package, into it."""

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib) / "megatron_npu" / "patches"
        target.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / "patches").iterdir():
            shutil.copy(file, target / file.name)


setup(license="Apache-2.0", cmdclass={"build_py": BuildWithPins})
