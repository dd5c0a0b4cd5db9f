"""Check that a checkpoint's description, which may come from an untrusted source, is plausible.

The description is checked before anything is built: 10⁹ layers would use all memory, and a string instead of
a number would cause an error deep inside megatron-core.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_npu.base.arg_parser import Number
from megatron_npu.base.errors import UsageError, either
from megatron_npu.checkpoint_files import disks
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.flags import arguments, expert_flags, rotary_flags, validation
from megatron_npu.pretrain.flags.checks import model, rotary

# Beside the flags: what follows from them, and from the data.
_SIZES = ("tokenizer_vocab_size", "padded_vocab_size", "world_size", "data_parallel_size")
_size = Number("a positive integer", int, 1, metavar="N")


def arguments_of(found: CheckpointInfo) -> dict[str, Any]:
    """Return the arguments that a checkpoint's description contains, after checking them.

    Flags that did not exist when it was saved get defaults.

    Raises:
        UsageError: the arguments are not valid flags of the trainer, or describe more weights than the files
            contain.
    """
    # --help, --config and --preset leave no value behind
    flags = {a.dest: a for a in arguments.parser()._actions if a.default is not argparse.SUPPRESS}
    defaults = {name: flag.default for name, flag in flags.items() if not flag.required}
    values = defaults | expert_flags.of_a_dense_model() | found.arguments
    for name, flag in flags.items():
        _require(found, name, values.get(name), *_admitted(flag))
    for name in _SIZES:
        _require(found, name, values.get(name), _size, (None,))
    heads = max(values["num_attention_heads"], 1)
    known = {"kv_channels": values.get("kv_channels") or values["hidden_size"] // heads}
    _require_positions_and_windows({**values, **known})
    _require_weights(found, values)
    return values


def _require_positions_and_windows(values: Mapping[str, Any]) -> None:
    """Check flags that affect how the model runs, such as the length of the window pattern and the rotary
    base.

    Raises:
        UsageError: a value is invalid; the error names the flag.
    """
    args = Namespace(**values)  # which the checks of the command line take
    validation.ranges(args)
    if args.window_attn_skip_freq is not None and getattr(args, "window_size", None) is None:
        model.windows(args)
    if args.position_embedding_type in rotary_flags.ROTATED:
        rotary.check(args)


def _admitted(flag: argparse.Action) -> tuple[Number | type[bool] | None, tuple[Any, ...]]:
    """Return the type that the values of a flag must have, and the flag's choices.

    If the type is None and there are no choices, the flag's values are not checked here.
    """
    others = () if flag.required or flag.default is not None else (None,)
    if flag.choices is not None and flag.nargs is None:
        return None, (*flag.choices, *others)
    if isinstance(flag.type, Number) and flag.nargs is None:
        return flag.type, others
    if isinstance(flag.default, bool) and flag.nargs == 0:
        return bool, others
    return None, ()


def _require(
    found: CheckpointInfo, name: str, value: Any, kind: Number | type[bool] | None, others: tuple[Any, ...]
) -> None:
    """Check that a value has the given type or is one of ``others``.

    Raises:
        UsageError: neither is the case.
    """
    if (kind is None and not others) or any(value is other or value == other for other in others):
        return
    if isinstance(kind, Number):
        fits = _is_number(value, kind)
        expected = kind.expected
    else:
        fits, expected = kind is bool and isinstance(value, bool), "on or off"
        if kind is None:
            expected = either(others)
    if not fits:
        raise _unfit(found, f"its {name} must be {expected}, but is {repr(value)[:60]}")


def _is_number(value: Any, kind: Number) -> bool:
    admitted = int if kind.kind is int else (int, float)
    is_one = isinstance(value, admitted) and not isinstance(value, bool)
    return is_one and kind.holds(value)


def _require_weights(found: CheckpointInfo, values: Mapping[str, Any]) -> None:
    """Check that the checkpoint's files are large enough for the model, assuming at least one byte per
    weight.
    """
    least, held = _fewest_weights(values), _bytes(found)
    if least > held and not disks.absent(found.path):
        raise _unfit(
            found,
            f"its model has at least {least:,} weights, but its files have only {held:,} bytes",
        )


def _fewest_weights(values: Mapping[str, Any]) -> int:
    """Return a lower bound for the number of weights in the model.

    The bound counts norms, embedding tables and one matrix of an MLP.
    """
    rows = max(values.get("tokenizer_vocab_size") or 0, values["make_vocab_size_divisible_by"])
    if values["position_embedding_type"] == "learned_absolute":
        rows += values["max_position_embeddings"]
    experts = values["num_experts"] or 0
    inner = 0 if experts else values["ffn_hidden_size"] or 0
    latent = values["multi_latent_attention"]  # whose heads have sizes of their own
    heads = 0 if latent else values["num_attention_heads"] * (values["kv_channels"] or 1)
    return (values["num_layers"] + rows + experts + inner + heads) * values["hidden_size"]


def _bytes(found: CheckpointInfo) -> int:
    return sum(file.stat().st_size for file in found.path.rglob("*") if file.is_file())


def _unfit(found: CheckpointInfo, problem: str) -> UsageError:
    return UsageError(
        f"the checkpoint {found.path} is invalid: {problem}", remedy="Load a complete checkpoint."
    )
