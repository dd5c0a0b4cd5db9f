"""The rotary embedding in ``config.json`` and in the driver's flags; the families that have one share it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_npu.conversion import config as config_file
from megatron_npu.conversion.config import Config

# What megatron-core's --use-rope-scaling has built in (0.12 to 0.16); its factor alone is a flag.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def flags(config: Config, usual_base: float = 1e4) -> dict[str, object]:
    """Return the flags, from the keys of transformers 5, of those before, or of both.

    Args:
        config: the keys.
        usual_base: the family's base where they name none.

    Raises:
        UsageError: another embedding than the plain one and that of Llama 3, or keys that contradict.
    """
    config.require("partial_rotary_factor", 1.0)
    values = _agreeing(config)
    base = values.pop("rope_theta", usual_base)
    if not config_file.is_number(base) or base != int(base) or base < 1:
        raise config.refusal("rope_theta", base, "a whole number, as --rotary-base is")
    result: dict[str, object] = {"--rotary-base": int(base)}
    kind = values.pop("rope_type", "default")
    if kind == "llama3":
        factor = result["--rope-scaling-factor"] = values.pop("factor", 8.0)
        if not config_file.is_number(factor):
            raise config.refusal("rope_scaling factor", factor, "a number")
        expected = _LLAMA3
    elif kind == "default":
        expected = {"partial_rotary_factor": 1.0}
    else:
        raise config.refusal("rope_type", kind, '"default" or "llama3"')
    for key, value in values.items():
        if value != expected.get(key):
            raise config.refusal(f"rope_scaling {key}", value, f"{expected.get(key, 'no such key')}")
    return result


def _agreeing(config: Config) -> dict[str, Any]:
    """Return what the tables and the key beside them say together.

    transformers 5 lets ``rope_scaling`` win, and 4 knows nothing of ``rope_parameters``.
    """
    found: dict[str, Any] = {}
    tables = (config.table("rope_parameters"), config.table("rope_scaling"))
    plain = {"rope_theta": config.real("rope_theta")} if config.has("rope_theta") else {}
    for values in (*tables, plain):
        for key, value in values.items():
            key = "rope_type" if key == "type" else key
            if value is not None and found.setdefault(key, value) != value:
                raise config.refusal(key, [found[key], value], "one value wherever it is named")
    return found


def keys(args: Namespace) -> dict[str, object]:
    """Return the keys of ``config.json``: those of transformers 5, and beside them those that 4 reads."""
    base = float(args.rotary_base)
    scaling = _scaling(args)
    parameters = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    return {"rope_parameters": parameters, "rope_theta": base, "rope_scaling": scaling}


def _scaling(args: Namespace) -> dict[str, object] | None:
    if not args.use_rope_scaling:
        return None
    return {"rope_type": "llama3", "factor": args.rope_scaling_factor, **_LLAMA3}
