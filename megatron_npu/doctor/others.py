"""Find other packages that replace layers or functions of Megatron, and determine which replacement takes
effect.
"""

from __future__ import annotations

from importlib.metadata import packages_distributions, version

from megatron_npu.base import settings
from megatron_npu.base.installed_packages import spec_of
from megatron_npu.upstream import early_import

_LAYERS = f"megatron-core uses its layers if it is installed; {settings.TE.name}=local has no effect"
_PATCHES = (
    "in a script that imports it, its patches take effect, because they are applied after this package's"
)
# By the names of their modules. Ascend's TransformerEngineNPU has the name of NVIDIA's package.
_KNOWN = {"transformer_engine": _LAYERS, "mindspeed": _PATCHES, "megatron_adaptor": _PATCHES}


def others() -> dict[str, str]:
    """Return the installed packages that replace parts of Megatron, keyed by module."""
    present = [name for name in _KNOWN if not early_import.is_absent(name)]
    owners = packages_distributions() if present else {}
    return {name: f"{_owner(name, owners.get(name, []))}: {_KNOWN[name]}" for name in present}


def _owner(name: str, distributions: list[str]) -> str:
    if distributions:
        return ", ".join(f"{each} {version(each)}" for each in dict.fromkeys(distributions))
    spec = spec_of(name)
    return (
        f"not installed with pip, {spec.origin}"
        if spec is not None and spec.origin
        else "not installed with pip"
    )


def advice(found: dict[str, str]) -> list[str]:
    """Return advice about each package that patches the same parts of Megatron as this package."""
    return [
        (
            f"{name} patches Megatron, as this package does: use only one of them in a run. "
            f"{settings.AUTOLOAD.name}=0 disables this package."
        )
        for name in found
        if _KNOWN[name] is _PATCHES
    ]
