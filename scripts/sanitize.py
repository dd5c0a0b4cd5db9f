"""Run the tests of the compiled kernels with AddressSanitizer and UndefinedBehaviorSanitizer.

python scripts/sanitize.py [ARGUMENTS OF PYTEST]

A read or write beyond the end of a tensor ends the run with g++'s report of the position. First, a kernel is
called with too large a number of values, bypassing all checks: if the sanitizers did not detect this, the run
would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    *("compiled", "compiled_boundary", "products", "fused_attention", "attention_blockwise"),
    *("linear", "linear_cross_entropy"),
)
_COMPILE = "import torch, tests.sanitized; from megatron_npu.ops.compiled import library; library()"
_BEYOND = """
import torch
import tests.sanitized
from megatron_npu.ops.compiled import abi
values, sums = torch.zeros(4, 16), torch.zeros(4)
abi._call("exponentials_float32", values.data_ptr(), sums.data_ptr(), sums.data_ptr(), 5, 16)
"""


def main(arguments: list[str]) -> int:
    """Return pytest's exit code, or 1 if the sanitizers do not detect a deliberate error."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **_environment(cache)}
        # By a Python without libasan, since g++ would be slow with it; to load the library this one fails.
        unloaded = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
        subprocess.run([sys.executable, "-c", _COMPILE], cwd=ROOT, env=unloaded, stderr=subprocess.DEVNULL)
        run = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
        noticed = subprocess.run(
            [*run, "-c", _BEYOND], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if noticed.returncode == 0 or "heap-buffer-overflow" not in noticed.stderr:
            print(f"sanitize: a write beyond a tensor was not noticed\n{noticed.stderr}", file=sys.stderr)
            return 1
        named = any(not argument.startswith("-") for argument in arguments)
        files = [] if named else [f"tests/ops/test_{name}.py" for name in TESTS]
        command = [*run, "-m", "pytest", "-q", "-p", "tests.sanitized", *arguments, *files]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _environment(cache: str) -> dict[str, str]:
    """Return the environment variables for an unsanitized Python with sanitized extensions."""
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": ":".join(libraries),
        # Python frees nothing at its end; what torch and its libraries do is theirs
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "HOME": cache,  # no library of these is left in the user's own
        "XDG_CACHE_HOME": f"{cache}/.cache",
        "PYTHONPATH": str(ROOT),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
