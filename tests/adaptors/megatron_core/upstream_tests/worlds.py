"""How many ranks a file of upstream's tests gets, and in what environment."""

from __future__ import annotations

import json
import re
from pathlib import Path

UPSTREAM = 8  # ranks in upstream's CI: its run_ci_test.sh, core_v0.12.1 to core_v0.16.1
_PARALLEL = re.compile(
    r"\bUtils\b|torch\.distributed|parallel_state|\bdist\."
    r"|tests\.unit_tests\.determinism"  # 0.19: its runner of layouts, which skips those with too few ranks
)
_LAYOUT = re.compile(r"initialize_model_parallel\(([^()]*)\)?")
_ONES = re.compile(r"(\s*(\w+\s*=\s*)?1\s*,?)*\s*")
# Words of a file that may do something else in eight ranks than in one.
_WORLD = re.compile(
    r"world_size|rank|torch\.distributed|\bdist\b|device_count|HyperCommGrid|\b(tp|pp|ep|cp|dp)(_size)?\b"
    r"|from tests\.unit_tests\.(?!test_utilities)"
)
_NAMED = Path(__file__).with_name("worlds.json")


def size_for(checkout: Path, file: str, named: dict[str, dict] | None = None) -> int:
    """Return the ranks for ``file`` (its path in the checkout).

    Eight as in upstream's CI. One where eight would do the same eight times: the text has nothing of
    torch.distributed or Megatron's groups, or only layouts of one rank and no word about ranks. Else what
    ``worlds.json`` gives the file, with a reason.
    """
    rules = json.loads(_NAMED.read_text()) if named is None else named
    if "ranks" in rules.get(file, {}):
        return rules[file]["ranks"]
    text = (checkout / file).read_text()
    layouts = _LAYOUT.findall(text)
    alone = layouts and all(map(_ONES.fullmatch, layouts)) and not _WORLD.search(text)
    return UPSTREAM if _PARALLEL.search(text) and not alone else 1


def environment_for(file: str) -> dict[str, str]:
    """Return the variables that a file gets besides those of every file: ``worlds.json``, with a reason."""
    return json.loads(_NAMED.read_text()).get(file, {}).get("environment", {})
