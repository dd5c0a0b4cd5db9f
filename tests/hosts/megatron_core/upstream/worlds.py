"""How many ranks a file of upstream's tests gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

UPSTREAM = 8  # ranks in upstream's CI: its run_ci_test.sh, core_v0.12.1 to core_v0.16.1
_PARALLEL = re.compile(r"\bUtils\b|torch\.distributed|parallel_state|\bdist\.")
_NAMED = Path(__file__).with_name("worlds.json")


def size_for(checkout: Path, file: str, named: dict[str, dict] | None = None) -> int:
    """Return the ranks for ``file`` (its path in the checkout).

    Eight as in upstream's CI; one where the text has nothing of torch.distributed or Megatron's groups, so
    that eight would do the same eight times; else what ``worlds.json`` gives the file, with a reason.
    """
    rules = json.loads(_NAMED.read_text()) if named is None else named
    if file in rules:
        return rules[file]["ranks"]
    return UPSTREAM if _PARALLEL.search((checkout / file).read_text()) else 1
