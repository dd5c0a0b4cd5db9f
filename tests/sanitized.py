"""A plugin of pytest: the kernels are compiled with AddressSanitizer and UndefinedBehaviorSanitizer.

``make sanitize`` loads it, in a Python before which libasan was loaded.
"""

from __future__ import annotations

import os

from megatron_npu.ops.compiled import building
from megatron_npu.process import cached_library
from tests.support import processes

os.environ.pop("LD_PRELOAD", None)  # g++, which tests start, would be slow with it
cached_library._LONGEST = 1800  # seconds: a compilation takes longer with them
building._FLAGS = (
    *building._FLAGS,
    *("-Werror", "-g", "-O1", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)


def pytest_report_header() -> str:
    """Say that the library is what it should be: where there is none, tests are skipped."""
    loaded = building.library()
    assert loaded is not None, "the kernels cannot be compiled with sanitizers here"
    symbols = processes.run(["nm", "-D", loaded._name], capture_output=True, text=True, check=True).stdout
    assert "__asan_report_store" in symbols
    assert "__ubsan_handle" in symbols
    return f"kernels with sanitizers: {loaded._name}"
