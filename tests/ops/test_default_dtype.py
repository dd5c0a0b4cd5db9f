"""torch's default dtype decides nothing: under another one every operation gives the same bits.

Lightning sets another one around each forward (``bf16-true``). Bad memory ends a process: each has its own.
"""

from __future__ import annotations

import functools
import json
import sys

import pytest

from tests.support import tiny, warm


@functools.cache
def digests(default: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.ops.in_default_dtype", default]
    result = warm.run(command, env=tiny.environment(), capture_output=True, text=True)
    assert result.returncode == 0, f"{result.returncode}: {result.stderr[-2000:]}"
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("default", ["bfloat16", "float64"])
def test_every_operation_gives_the_same_bits(default):
    expected, found = digests("float32"), digests(default)
    assert len(expected) > 100
    failed = {name: text for name, text in expected.items() if ":" in text}
    assert not failed
    different = [name for name in expected if found[name] != expected[name]]
    assert not different
