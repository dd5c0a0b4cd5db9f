"""Report what the suite could not test here: the skipped tests, grouped by what they require."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

# the first that matches a reason names the group
GROUPS = {
    "a Megatron tree or wheel (make megatron)": (
        r"no tree of|no checkouts|get_megatron|a Megatron since|no compiled helpers_cpp"
    ),
    "the simulated Ascend": r"simulated Ascend|torch_npu wheel",
    "an NPU or a GPU": r"needs an NPU|no GPU|no CUDA|cuda is not|for an NPU|without an NPU|a simulated NPU's",
    "data (../shared/data or make demo)": r"gpt2-vocab|lambada|LAMBADA",
    "a requirement document (../shared/seeds)": r"no text of the (guide|document)",
    "time (TEST_EVERY_VERSION=1)": r"TEST_EVERY_VERSION",
    "a program": (
        r"no (Chromium|g\+\+|gcc|C\+\+ compiler|shellcheck|git)|needs (gcc|g\+\+|the command)|"
        r"not compile here"
    ),
    "a package": (
        r"could not import|not installed|no Megatron is installed|needs (einops|nltk|flask|expecttest)|"
        r"pip install|oneDNN|nor backports|without gigatoken"
    ),
    "another system or machine": (
        r"Linux|glibc|root|needs (/proc|a pseudo-terminal)|one core|the processor has no|no fake CUDA|"
        r"is taken|plain copy|the CPU build of torch"
    ),
}
CASE = "nothing: the case does not arise here"
_CASE = r"^(Skipped: )?the case: "  # so a reason begins that names what is there, and not what is missing
UNKNOWN = "something that has no group in tests/support/skipped.py"


def group_of(reason: str) -> str:
    """Return the requirement that was missing for a test that was skipped for ``reason``."""
    known = {CASE: _CASE, **GROUPS}
    return next((name for name, pattern in known.items() if re.search(pattern, reason)), UNKNOWN)


def summary(reasons: Iterable[str]) -> list[str]:
    """Return a line for each group, the largest group first; tests that lack nothing come last."""
    counts = Counter(map(group_of, reasons))
    ordered = sorted(counts.items(), key=lambda item: (item[0] == CASE, -item[1]))
    return [f"{number:5} skipped for want of {name}" for name, number in ordered]
