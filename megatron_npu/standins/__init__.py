"""Provide stub modules for packages that an upstream imports but that are not installed.

Each stub has only the names that the upstream uses. A stub never replaces a real package.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

import numpy

from megatron_npu.base import settings
from megatron_npu.base.replaced import Replaced
from megatron_npu.upstream import early_import
from megatron_npu.upstream.megatrons import Upstream


@dataclass(frozen=True)
class StandIn:
    """A stub module to be added to ``sys.modules`` under ``name`` if ``needs`` cannot be imported.

    Attributes:
        name: the module name that the upstream imports.
        source: our module that has the names that the upstream uses.
        needs: the package that makes the stub unnecessary if it is installed; if empty, the stub is always
            installed.
        upstreams: the upstreams that import the module.
        why: what happens without the stub.
        unless: a pattern for upstream files that make the stub unnecessary.
        te: the value of ``MEGATRON_NPU_TE`` with which the stub is used; empty means any value.
    """

    name: str
    source: str
    needs: str
    upstreams: tuple[str, ...]
    why: str
    unless: str = ""
    te: str = ""


@dataclass(frozen=True)
class NameStandIn:
    """A name to be added to an existing module that lacks it.

    Attributes:
        module, name, value: the module, the missing name, and its value.
        upstreams: the upstreams that import the name.
        why: what happens without the name.
        beside: the package that imports the name, if it is not the upstream itself: the name is added if that
            package is installed.
        within: a pattern for upstream files that import the name: the name is added if there are any.
    """

    module: str
    name: str
    value: Any
    upstreams: tuple[str, ...]
    why: str
    beside: str = ""
    within: str = ""

    def is_taken(self, upstream: Upstream) -> bool:
        """Return True if ``upstream``, or a package used with it, imports the name."""
        if upstream.name not in self.upstreams or (self.beside and _absent(self.beside)):
            return False
        return not self.within or any(upstream.root.glob(self.within))


def _override(method: Any) -> Any:
    """Mark a method as an override for type checkers, like ``typing.override`` of Python 3.12."""
    return method


_APEX = "Megatron-LM's megatron.optimizer, megatron.utils and clip_grads always import apex and amp_C"
_LM = (
    "megatron_lm",
    "megatron_deepspeed",
    "megatron_deepspeed_core",
)  # megatron-core looks for apex and goes on without

_MAMBA = "megatron_npu.standins.mamba_ssm"
_MAMBA_MODULES = {  # of the package, and ours
    "mamba_ssm": _MAMBA,
    "mamba_ssm.ops": _MAMBA,
    "mamba_ssm.ops.triton": _MAMBA,
    "mamba_ssm.ops.triton.layernorm_gated": f"{_MAMBA}.layernorm_gated",
    "mamba_ssm.ops.triton.ssd_combined": f"{_MAMBA}.ssd_combined",
}
_FLA = "megatron_npu.standins.fla"
_FLA_MODULES = {
    "fla": _FLA,
    "fla.modules": _FLA,
    "fla.modules.convolution": f"{_FLA}.convolution",
    "fla.modules.l2norm": f"{_FLA}.l2norm",
    "fla.ops": _FLA,
    "fla.ops.gated_delta_rule": f"{_FLA}.gated_delta_rule",
}
_TE = "megatron_npu.standins.transformer_engine"
_TE_MODULES = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.recipe",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.attention",
    "transformer_engine.pytorch.distributed",
    "transformer_engine.pytorch.fp8",
    "transformer_engine.pytorch.ops",
    "transformer_engine.pytorch.tensor",
)

_COMPILED_IN_THE_CHECKOUT = "upstream compiles it into the checkout when training starts"
_COMPILED_HELPERS = "megatron/data/helpers*" + EXTENSION_SUFFIXES[0]

STAND_INS = (
    StandIn("apex", "megatron_npu.standins.apex", "apex", _LM, _APEX),
    StandIn("apex.optimizers", "megatron_npu.standins.apex.optimizers", "apex.optimizers", _LM, _APEX),
    StandIn(
        "apex.multi_tensor_apply",
        "megatron_npu.standins.apex.multi_tensor_apply",
        "apex.multi_tensor_apply",
        _LM,
        _APEX,
    ),
    StandIn("amp_C", "megatron_npu.standins.amp_C", "amp_C", _LM, _APEX),
    StandIn(
        "torch._six",
        "megatron_npu.standins.torch_six",
        "torch._six",
        _LM,
        "megatron.optimizer.clip_grads imports inf from it; torch 2.0 removed it",
    ),
    StandIn(
        "fused_weight_gradient_mlp_cuda",
        "megatron_npu.standins.fused_weight_gradient_mlp_cuda",
        "fused_weight_gradient_mlp_cuda",
        ("megatron_lm", "megatron_core", "megatron_deepspeed_core"),
        "--gradient-accumulation-fusion is on by default and needs this apex extension",
    ),
    StandIn(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "megatron_npu.standins.batch_invariant_kernels",
        "triton",
        ("megatron_core",),
        "megatron.training.initialize 0.16 always imports it, and it imports triton",
        unless="megatron/core/inference/moe/batch_invariant.py",  # since 0.20, which does without triton
    ),
    StandIn(
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
        "megatron_npu.standins.mamba_tensor_ops",
        "triton",
        ("megatron_core",),
        "0.16's text-generation server and inference examples always import it through mamba_builders, and "
        "it imports triton",
    ),
    *(
        StandIn(
            f"megatron.core.ssm.ops.{name}",
            "megatron_npu.standins.ssm_generation",
            "triton",
            ("megatron_core",),
            "megatron.training 0.20 always imports it through the hybrid models, and it imports triton",
        )
        for name in ("common.causal_conv1d_varlen", "mamba2.batch_invariant_decode")
    ),
    StandIn(
        "emerging_optimizers.triton_kernels",
        "megatron_npu.standins.emerging_triton_kernels",
        "triton",
        ("megatron_core",),
        "emerging_optimizers 0.3, which provides Muon, always imports it, and it imports triton; Megatron "
        "would treat the package as absent",
    ),
    StandIn(
        "mcore_bridge.model.modules.kernels.qsa_block_sparse_attn",
        "megatron_npu.standins.qsa_triton_kernel",
        "triton",
        ("megatron_core",),
        "mcore-bridge 1.6.5 always imports it, and it imports triton",
    ),
    StandIn(
        "megatron.core.transformer.moe.paged_stash",
        "megatron_npu.standins.paged_stash",
        "triton",
        ("megatron_core",),
        "since 0.18 megatron.core itself always imports it through the schedules, and it imports triton",
    ),
    StandIn(
        "megatron.core.extensions.transformer_engine",
        "megatron_npu.standins.transformer_engine_layers",
        "transformer_engine",
        ("megatron_core",),
        "0.12's specs of ViT and LLaVA always import its layers, even for their local specs",
        unless="megatron/core/models/backends.py",  # since 0.13, whose module can be imported without
        te="none",
    ),
    *(
        StandIn(
            name,
            _TE if name == "transformer_engine" else f"{_TE}.{name.rpartition('.')[2]}",
            "transformer_engine",
            ("megatron_core",),
            "MEGATRON_NPU_TE=local: layers under TransformerEngine's names",
            te="local",
        )
        for name in _TE_MODULES
    ),
    StandIn(
        "transformer_engine_torch",
        "megatron_npu.standins.transformer_engine_torch",
        "transformer_engine",
        ("megatron_core",),
        "MEGATRON_NPU_TE=local: determines which tokens of packed sequences a context-parallel rank has",
        te="local",
    ),
    *(
        StandIn(
            name,
            source,
            "mamba_ssm",
            ("megatron_core",),
            "MEGATRON_NPU_TE=local: Mamba's layers, which are built from TransformerEngine's layers, use it",
            te="local",
        )
        for name, source in _MAMBA_MODULES.items()
    ),
    *(
        StandIn(
            name,
            source,
            "fla",
            ("megatron_core",),
            "MEGATRON_NPU_TE=local: gated delta nets, which are built from TransformerEngine's layers, use "
            "it",
            te="local",
        )
        for name, source in _FLA_MODULES.items()
    ),
    StandIn(
        "fast_hadamard_transform",
        "megatron_npu.standins.fast_hadamard_transform",
        "fast_hadamard_transform",
        ("megatron_core",),
        "MEGATRON_NPU_TE=local: DeepSeek's sparse attention, which is built from TransformerEngine's "
        "layers, needs it",
        te="local",
    ),
    StandIn(
        "megatron.model.vision.knn_monitor",
        "megatron_npu.standins.knn_monitor",
        "torchvision",
        _LM,
        "megatron.training always imports it, and it imports torchvision",
    ),
    StandIn(
        "deepspeed.compression.compress",
        "megatron_npu.standins.deepspeed_compression",
        "deepspeed.compression.compress",
        ("megatron_deepspeed_core",),
        "megatron.training in deepspeedai's tree always imports it; DeepSpeed 0.19.8 no longer has it",
    ),
    StandIn(
        "megatron.data.helpers",
        "megatron_npu.standins.datasets.dataset_helpers",
        "",
        ("megatron_lm", "megatron_deepspeed"),
        _COMPILED_IN_THE_CHECKOUT,
        unless=_COMPILED_HELPERS,
    ),
    StandIn(
        "megatron.data.helpers",
        "megatron_npu.standins.datasets.wide_dataset_helpers",
        "",
        ("megatron_deepspeed_core",),
        _COMPILED_IN_THE_CHECKOUT,
        unless=_COMPILED_HELPERS,
    ),
    StandIn(
        "megatron.core.datasets.helpers_cpp",
        "megatron_npu.standins.datasets.core_dataset_helpers",
        "",
        ("megatron_core",),
        "a checkout compiles it when training starts, and a wheel ships it",
        unless="megatron/core/datasets/helpers_cpp*" + EXTENSION_SUFFIXES[0],
    ),
)

NAME_STAND_INS = (
    NameStandIn(
        "numpy",
        "float",
        float,
        _LM,
        "megatron.data.indexed_dataset lists it among its dtypes; NumPy 1.24 removed it",
    ),
    NameStandIn(
        "numpy",
        "product",
        numpy.prod,
        ("megatron_core",),
        "0.12 and 0.13 use it to save checkpoints of the distributed optimizer; NumPy 2.0 removed it",
    ),
    NameStandIn(
        "typing",
        "override",
        _override,
        ("megatron_core",),
        "megatron.training 0.18 and newer imports it, but Python has it only since 3.12; no script would "
        "start",
        within="megatron/training/models/hybrid.py",
    ),
    NameStandIn(
        "typing",
        "override",
        _override,
        ("megatron_core",),
        "emerging_optimizers 0.3 imports it, but Python has it only since 3.12; megatron-core 0.17 and "
        "newer import that package if it is installed, and their import would fail",
        beside="emerging_optimizers",
    ),
)
_given = Replaced()  # the names


def install(upstream: Upstream) -> list[StandIn]:
    """Install the stubs for ``upstream``, and return the stubs that were needed."""
    # All are looked for before any is put in place: ours would be found as the parent of the next.
    needed = [stand_in for stand_in in STAND_INS if is_needed(stand_in, upstream)]
    for stand_in in needed:
        sys.modules[stand_in.name] = importlib.import_module(stand_in.source)
    for lost in NAME_STAND_INS:
        module = importlib.import_module(lost.module)
        if lost.is_taken(upstream) and lost.name not in vars(module):
            _given.set(module, lost.name, lost.value)
    return needed


def is_needed(stand_in: StandIn, upstream: Upstream) -> bool:
    """Return True if ``upstream`` imports a module that is not installed."""
    if upstream.name not in stand_in.upstreams or stand_in.name in sys.modules:
        return False
    if stand_in.te not in ("", settings.TE.get()):
        return False
    return _absent(stand_in.needs) and not (stand_in.unless and any(upstream.root.glob(stand_in.unless)))


def te_layers() -> bool:
    """Return True if our layers are installed under TransformerEngine's names in this process."""
    return _stands_for("transformer_engine", _TE)


def mamba_kernels() -> bool:
    """Return True if our scan is installed under mamba_ssm's names in this process."""
    return _stands_for("mamba_ssm", _MAMBA)


def _stands_for(package: str, source: str) -> bool:
    return getattr(sys.modules.get(package), "__name__", "") == source


def _absent(package: str) -> bool:
    return not package or early_import.is_absent(package)


def remove() -> None:
    """Remove everything that ``install`` added to ``sys.modules`` and to other modules."""
    _given.undo()
    for stand_in in STAND_INS:
        module = sys.modules.get(stand_in.name)
        if module is not None and module.__name__ == stand_in.source:
            del sys.modules[stand_in.name]
