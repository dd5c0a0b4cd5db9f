"""The rotary embedding in ``config.json`` and in the driver's flags; the families that have one share it."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.conversion.config import Config

# What megatron-core's --use-rope-scaling has built in (0.12 to 0.16); its factor alone is a flag.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def flags(config: Config) -> dict[str, object]:
    """Return the flags, from the keys of transformers 5 or of those before.

    Raises:
        UsageError: another embedding than the plain one and that of Llama 3.
    """
    config.require("partial_rotary_factor", 1.0)
    rope, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    base = rope.pop("rope_theta", None) or config.take("rope_theta", 10000.0)
    config.take("rope_theta", base)
    if base != int(base):
        raise config.refusal("rope_theta", base, "a whole number, as --rotary-base is")
    result: dict[str, object] = {"--rotary-base": int(base)}
    scaling |= rope
    kind = scaling.pop("rope_type", None) or scaling.get("type", "default")
    scaling.pop("type", None)
    if kind == "llama3":
        result["--rope-scaling-factor"] = scaling.pop("factor", 8.0)
        expected = _LLAMA3
    elif kind == "default":
        expected = {}
    else:
        raise config.refusal("rope_type", kind, '"default" or "llama3"')
    for key, value in scaling.items():
        if value is not None and value != expected.get(key):
            raise config.refusal(f"rope_scaling {key}", value, f"{expected.get(key, 'no such key')}")
    return result


def keys(args: Namespace) -> dict[str, object]:
    """Return the keys of ``config.json``, readable by transformers 4 and 5."""
    return {"rope_theta": float(args.rotary_base), "rope_scaling": _scaling(args)}


def _scaling(args: Namespace) -> dict[str, object] | None:
    if not args.use_rope_scaling:
        return None
    return {"rope_type": "llama3", "factor": args.rope_scaling_factor, **_LLAMA3}
