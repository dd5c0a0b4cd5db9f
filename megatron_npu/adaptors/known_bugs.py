"""List the upstream bugs that this project fixes, as the adaptors have recorded them.

The page docs/reference/known-upstream-bugs.md and ``megatron-npu doctor --known-bugs`` print this list; the
ledger lists the patches that fix the bugs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu import adaptors
from megatron_npu.adaptors.shared.decorators import is_backport, is_cured_in_own_programs
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.registry import registry
from megatron_npu.patching.versions import admits


@dataclass(frozen=True)
class Bug:
    """An upstream bug that this project fixes in one or more places.

    Attributes:
        effect: the wrong behavior that the bug causes.
        until: the upstream version that contains the fix.
        targets: the functions that are fixed, in the form ``module:Qual.name``.
        versions: PEP 440 specifiers of the versions that have the bug; an empty specifier means all versions.
        devices: the devices on which the bug occurs.
        wrong_numbers: whether the fix changes losses, gradients or their logged values. Such a fix is applied
            only with ``MEGATRON_NPU_BACKPORT=1``; all other fixes are always applied.
        cured_in_own_programs: whether this project's own training commands apply the fix without that
            setting.
    """

    effect: str
    until: str
    targets: tuple[str, ...]
    versions: tuple[str, ...]
    devices: tuple[str, ...]
    wrong_numbers: bool
    cured_in_own_programs: bool = False

    def is_in(self, version: str) -> bool:
        """Return True if the upstream version ``version`` has the bug."""
        return any(admits(versions, version) for versions in self.versions)


def bugs(upstream: str) -> list[Bug]:
    """Return the known bugs of ``upstream``.

    Bugs that cause wrong numbers come first.

    Raises:
        ModuleNotFoundError: there are no adaptors for that upstream.
    """
    adaptors.register(upstream)
    patches = [patch for patch in registry.patches if patch.upstream == upstream and patch.upstream_bug]
    told = dict.fromkeys((not is_backport(patch), patch.why, patch.until) for patch in patches)
    return [_bug([patch for patch in patches if (patch.why, patch.until) == key[1:]]) for key in sorted(told)]


def _bug(patches: list[Patch]) -> Bug:
    first = patches[0]
    return Bug(
        effect=first.why,
        until=first.until,
        targets=tuple(dict.fromkeys(patch.target for patch in patches)),
        versions=tuple(dict.fromkeys(patch.versions for patch in patches)),
        devices=first.devices,
        wrong_numbers=is_backport(first),
        cured_in_own_programs=is_cured_in_own_programs(first),
    )
