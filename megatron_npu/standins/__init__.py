"""Small modules for packages that a host imports although they are absent here.

Each has only the names that the host uses, and never takes the place of the real package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass

from megatron_npu.host import Host


@dataclass(frozen=True)
class StandIn:
    """A module to put into ``sys.modules`` under ``name`` when ``needs`` cannot be imported.

    Attributes:
        name: the module's name for the host.
        source: our module that has the names the host uses.
        needs: the package whose absence makes the stand-in necessary.
        hosts: the hosts that import it.
        why: what happens without it.
    """

    name: str
    source: str
    needs: str
    hosts: tuple[str, ...]
    why: str


STAND_INS = (
    StandIn(
        "fused_weight_gradient_mlp_cuda",
        "megatron_npu.standins.fused_weight_gradient_mlp_cuda",
        "fused_weight_gradient_mlp_cuda",
        ("megatron_lm", "megatron_core"),
        "--gradient-accumulation-fusion is on by default and needs this extension of apex",
    ),
    StandIn(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "megatron_npu.standins.batch_invariant_kernels",
        "triton",
        ("megatron_core",),
        "megatron.training.initialize 0.16 imports it always, and it imports triton",
    ),
)


def install(host: Host) -> list[StandIn]:
    """Put the stand-ins of ``host`` in place; return those that were needed."""
    needed = []
    for stand_in in STAND_INS:
        if host.name not in stand_in.hosts or stand_in.name in sys.modules:
            continue
        if importlib.util.find_spec(stand_in.needs) is None:
            sys.modules[stand_in.name] = importlib.import_module(stand_in.source)
            needed.append(stand_in)
    return needed


def remove() -> None:
    """Take out of ``sys.modules`` what ``install`` put there."""
    for stand_in in STAND_INS:
        module = sys.modules.get(stand_in.name)
        if module is not None and module.__name__ == stand_in.source:
            del sys.modules[stand_in.name]
