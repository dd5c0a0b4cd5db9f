"""Convert the settings of rotary embeddings between ``config.json`` and flags, for all model families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_npu.conversion import config as config_file
from megatron_npu.conversion.config import Config
from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.frozen_flags import Flags

# What Llama 3's scaling is where its keys are missing, and megatron-core's --use-rope-scaling has built in.
_LLAMA3_LENGTH = 8192
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LENGTH = "original_max_position_embeddings"
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def flags(config: Config, usual_base: float = 1e4) -> dict[str, object]:
    """Return the flags that correspond to the rotary keys of ``config.json``.

    The keys may follow transformers 5, earlier versions, or both.

    ``--max-position-embeddings`` is included if it differs from ``config.json``.

    Args:
        config: the keys.
        usual_base: the family's default base, used if the keys do not specify a base.

    Raises:
        UsageError: the embedding is not in ``_KINDS``, or keys contradict each other.
    """
    config.require("partial_rotary_factor", 1.0)
    values = _agreeing(config)
    base = values.pop("rope_theta", usual_base)
    if not config_file.is_number(base) or base != int(base) or base < 1:
        raise config.refusal("rope_theta", base, "an integer, as --rotary-base requires")
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise config.refusal("partial_rotary_factor", _agreeing(config)["partial_rotary_factor"], "1.0")
    kind = values.pop("rope_type", "default")
    if kind not in _KINDS:
        raise config.refusal("rope_type", kind, " or ".join(f'"{name}"' for name in _KINDS))
    scaling = _Scaling(config, values)
    plain = {"--position-embedding-type": "rope", "--rotary-base": int(base)}
    result = plain | getattr(scaling, kind)()
    scaling.finish()
    return result


def _agreeing(config: Config) -> dict[str, Any]:
    """Merge the tables of rotary settings with the top-level key ``rope_theta``.

    Values that occur twice must be equal.

    If they differed, the versions of transformers would disagree: transformers 5 prefers ``rope_scaling``,
    and transformers 4 ignores ``rope_parameters``.
    """
    found: dict[str, Any] = {}
    tables = (config.table("rope_parameters"), config.table("rope_scaling"))
    plain = {"rope_theta": config.real("rope_theta")} if config.has("rope_theta") else {}
    for values in (*tables, plain):
        for key, value in values.items():
            key = "rope_type" if key == "type" else key
            if value is not None and found.setdefault(key, value) != value:
                raise config.refusal(key, [found[key], value], "the same in every place that sets it")
    return found


class _Scaling:
    """The keys that describe how a rotary embedding is scaled, with a method for each ``rope_type``.

    Args:
        config: all keys of ``config.json``.
        values: the keys of the rotary tables, without the base and the type. Each key is removed once it has
            been handled.
    """

    def __init__(self, config: Config, values: dict[str, Any]) -> None:
        self._config, self._values = config, values

    def default(self) -> dict[str, object]:
        """Return no flags, because an embedding of this type is not scaled."""
        return {}

    def linear(self) -> dict[str, object]:
        """Return the flags for linear scaling, which divides the positions by a factor."""
        factor = self._number("factor", least=1)
        # the scripts of Megatron read whole numbers alone: 2 and not 2.0
        return {"--rotary-seq-len-interpolation-factor": int(factor) if factor == int(factor) else factor}

    def dynamic(self) -> dict[str, object]:
        """Return the flags for dynamic scaling, in which the base grows with the length of the text.

        For this type, ``max_position_embeddings`` is the length beyond which the base begins to grow.
        """
        factor, length = self._number("factor", least=1), self._config.number("max_position_embeddings")
        if factor > _MOST:
            raise self._config.refusal("rope_scaling factor", factor, f"at most {_MOST}")
        return {
            "--rope-scaling-type": rotary_flags.DYNAMIC,
            "--rope-scaling-factor": factor,
            "--rope-scaling-original-max-position-embeddings": length,
            "--max-position-embeddings": int(factor * length),
        }

    def llama3(self) -> dict[str, object]:
        """Return the flags for Llama 3's scaling, except for values that are built into megatron-core."""
        result: dict[str, object] = {"--rope-scaling-factor": self._number("factor", 8.0)}
        length = self._length(_LLAMA3_LENGTH if self._is_bare() else None)
        named = {
            "--rope-scaling-original-max-position-embeddings": (length, _LLAMA3_LENGTH),
            "--rope-scaling-low-freq-factor": (self._number("low_freq_factor", 1.0), 1.0),
            "--rope-scaling-high-freq-factor": (self._number("high_freq_factor", 4.0), 4.0),
        }
        low, high = (named[f"--rope-scaling-{end}-freq-factor"][0] for end in ("low", "high"))
        if low >= high:
            expected = f"less than high_freq_factor {high}"
            raise self._config.refusal("rope_scaling low_freq_factor", low, expected)
        return result | {flag: value for flag, (value, built_in) in named.items() if value != built_in}

    def _is_bare(self) -> bool:
        """Return True if no key other than the scaling factor remains."""
        return not any(key in self._values for key in _LLAMA3) and not self._config.has(_LENGTH)

    def yarn(self) -> dict[str, object]:
        """Return the flags for YaRN scaling."""
        factor = self._number("factor", least=1)
        weights = self._weights(factor)
        result: dict[str, object] = {
            "--position-embedding-type": "yarn",
            "--rotary-scaling-factor": factor,
            "--yarn-original-max-position-embeddings": self._length(None),
            "--yarn-beta-fast": self._number("beta_fast", 32.0),
            "--yarn-beta-slow": self._number("beta_slow", 1.0),
        }
        if weights != _USUAL_WEIGHTS:
            result |= {"--mscale": weights[0], "--mscale-all-dim": weights[1]}
        if self._values.pop("truncate", True) is not True:
            result[_ROUGH] = None
        return result

    def _weights(self, factor: float) -> tuple[float, float]:
        """Return the flags ``--mscale`` and ``--mscale-all-dim``, which scale queries and keys."""
        given = self._values.get("attention_factor")
        weights = self._number("mscale", 0.0, least=0), self._number("mscale_all_dim", 0.0, least=0)
        if given is None:
            return weights if all(weights) else _USUAL_WEIGHTS
        multiplier = self._number("attention_factor")
        if factor == 1:
            if multiplier != 1:
                raise self._config.refusal("rope_scaling attention_factor", given, "1.0 with factor 1")
            return _USUAL_WEIGHTS
        unit = 0.1 * math.log(factor)  # the multiplier of two weights is (1 + first·unit) / (1 + second·unit)
        return ((multiplier - 1) / unit, 0.0) if multiplier >= 1 else (0.0, (1 / multiplier - 1) / unit)

    def _length(self, default: int | None) -> int:
        """Return the original context length.

        As in transformers, the top-level key takes precedence over the tables.
        """
        beside = self._config.number(_LENGTH) if self._config.has(_LENGTH) else None
        inside = self._values.pop(_LENGTH, None)
        if None not in (beside, inside) and beside != inside:
            raise self._config.refusal(_LENGTH, [inside, beside], "the same in every place that sets it")
        value = beside or inside or default or self._config.number("max_position_embeddings")
        if not config_file.is_number(value) or value != int(value) or value < 1:
            raise self._config.refusal(f"rope_scaling {_LENGTH}", value, "a positive integer")
        return int(value)

    def _number(self, key: str, default: float | None = None, least: float = math.ulp(0.0)) -> float:
        value = self._values.pop(key, default)
        if value is None or not config_file.is_number(value) or value < least:
            expected = f"a number of at least {least}" if least in (0, 1) else "a positive number"
            raise self._config.refusal(f"rope_scaling {key}", value, expected)
        return value

    def finish(self) -> None:
        """Check that every key has been handled.

        Raises:
            UsageError: a key remains that this type of scaling does not support.
        """
        for key, value in self._values.items():
            raise self._config.refusal(f"rope_scaling {key}", value, "the key to be absent")


_MOST = 10_000  # times the original length
_USUAL_WEIGHTS = (1.0, 0.0)  # of --mscale and --mscale-all-dim
_ROUGH = "--no-yarn-correction-range-round-to-int"


def keys(args: Flags) -> dict[str, object]:
    """Return the rotary keys of ``config.json``, in the forms that transformers 5 and 4 read."""
    base = float(args.rotary_base)
    scaling = _scaling(args)
    parameters = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    result: dict[str, object] = {"rope_parameters": parameters, "rope_theta": base, "rope_scaling": scaling}
    if is_dynamic(args):
        result["max_position_embeddings"] = args.rope_scaling_original_max_position_embeddings
    return result


def is_dynamic(args: Flags) -> bool:
    """Return True if the rotary base grows with the length of the text."""
    return args.use_rope_scaling and args.rope_scaling_type == rotary_flags.DYNAMIC


def needs_head_dim(args: Flags) -> bool:
    """Return True if transformers requires the head size to be given in ``config.json``.

    Version 5.24 does so for Mixtral.
    """
    return is_dynamic(args) or args.position_embedding_type == "yarn"


def _scaling(args: Flags) -> Mapping[str, object] | None:
    if args.position_embedding_type == "yarn":
        return _yarn(args)
    if args.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": args.rotary_seq_len_interpolation_factor}
    if not args.use_rope_scaling:
        return None
    if is_dynamic(args):
        return {"rope_type": "dynamic", "factor": args.rope_scaling_factor}
    return {
        "rope_type": "llama3",
        "factor": args.rope_scaling_factor,
        "low_freq_factor": args.rope_scaling_low_freq_factor,
        "high_freq_factor": args.rope_scaling_high_freq_factor,
        _LENGTH: args.rope_scaling_original_max_position_embeddings,
    }


def _yarn(args: Flags) -> dict[str, object]:
    result: dict[str, object] = {
        "rope_type": "yarn",
        "factor": args.rotary_scaling_factor,
        _LENGTH: args.yarn_original_max_position_embeddings,
        "beta_fast": args.yarn_beta_fast,
        "beta_slow": args.yarn_beta_slow,
    }
    weights = args.mscale, args.mscale_all_dim
    if all(weights):
        result |= {"mscale": weights[0], "mscale_all_dim": weights[1]}
    elif weights != _USUAL_WEIGHTS:
        result["attention_factor"] = rotary_flags.concentration(args)
    if not args.yarn_correction_range_round_to_int:
        result["truncate"] = False
    return result
