"""Implement ``megatron-npu doctor --known-bugs``, which lists the bugs of a Megatron and whether they are
fixed.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from megatron_npu.adaptors import known_bugs
from megatron_npu.base import settings
from megatron_npu.upstream import megatrons


def tell(megatron: str | None, *, as_json: bool) -> int:
    """Print the known bugs of the Megatron in the folder ``megatron``.

    With None, use the Megatron that a run would import.

    Returns:
        Always 0.

    Raises:
        UsageError: no Megatron is found, or a ``MEGATRON_NPU_*`` variable is malformed.
    """
    settings.check()
    found = megatrons.find(*megatrons.named(megatron))
    present = [bug for bug in known_bugs.bugs(found.name) if bug.is_in(found.version)]
    wanted = settings.BACKPORT.enabled()
    if as_json:
        rows = [{**asdict(bug), "fixed": wanted or not bug.wrong_numbers} for bug in present]
        about = {"upstream": found.name, "version": found.version, "root": str(found.root)}
        print(json.dumps({**about, settings.BACKPORT.name: wanted, "bugs": rows}, indent=2))
        return 0
    print(f"{found.name} {found.version} in {found.root}")
    for bug in present:
        print(f"{_state(bug, wanted)}: {', '.join(bug.targets)}")
        here = bug.cured_in_own_programs and not wanted
        own = ["fixed in megatron-npu's own training commands"] if here else []
        for line in (bug.effect, f"until {bug.until}", *own):
            print(textwrap.indent(textwrap.fill(line, 90, break_on_hyphens=False), " " * 8))
    numbers = sum(bug.wrong_numbers for bug in present)
    print(
        f"{len(present)} known bugs: {len(present) - numbers} are always fixed; {numbers} that "
        f"make results wrong are {'fixed' if wanted else 'not fixed'} "
        f"({settings.BACKPORT.name}={int(wanted)})"
    )
    return 0


def _state(bug: known_bugs.Bug, wanted: bool) -> str:
    if not bug.wrong_numbers:
        return "fixed  "
    return "fixed  " if wanted else "present"
