"""List the supported model families by their ``model_type`` in ``config.json``."""

from __future__ import annotations

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import hf_gpt2, hf_llama, hf_moe, unsupported
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.family import Family, traits_of
from megatron_npu.pretrain.flags.frozen_flags import Flags

FAMILIES: dict[str, Family] = {
    family.MODEL_TYPE: family for family in (*hf_gpt2.KINDS, *hf_llama.KINDS, *hf_moe.KINDS)
}


def of_config(config: Config) -> Family:
    """Return the model family to which a ``config.json`` belongs.

    Raises:
        UsageError: ``model_type`` is not supported, or the weights are quantized.
    """
    kind = config.text("model_type")
    family = FAMILIES.get(kind)
    if family is None:
        raise config.refusal("model_type", kind, " or ".join(f'"{name}"' for name in FAMILIES))
    if config.has("quantization_config"):
        raise config.refusal(
            "quantization_config",
            config.take("quantization_config"),
            "absent, because only unquantized weights are supported",
        )
    return family


def of_arguments(args: Flags, before: str | None = None) -> Family:
    """Return the model family that is able to represent a checkpoint of the built-in trainer.

    The details are checked later by ``Family.config``.

    Args:
        args: the checkpoint's flags.
        before: the ``model_type`` of the model that the checkpoint was converted from. It is used if two
            families can represent the same model: for example, a Mistral model without a window is also a
            valid Llama model.

    Raises:
        UsageError: no family supports one of the flags, or their combination.
    """
    unsupported.common(args)
    if before in FAMILIES and _holds(FAMILIES[before], args):
        return FAMILIES[before]
    claiming = [family for family in FAMILIES.values() if family.claims(args)]
    if len(claiming) != 1:
        together = " and ".join(sorted(traits_of(args)))
        raise UsageError(
            f"the checkpoint was trained with {together}, but no supported model has this combination of "
            f"features; the supported model types are {', '.join(FAMILIES)}. Nothing was written."
        )
    return claiming[0]


def _holds(family: Family, args: Flags) -> bool:
    try:
        family.config(args)
    except UsageError:
        return False
    return True
