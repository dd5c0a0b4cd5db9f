"""Load a trained model from its checkpoint, whole or partitioned, for generation, evaluation and
conversion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_npu import devices, plugin
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, stranger_weights
from megatron_npu.generation.sampling.without_prediction import without_prediction
from megatron_npu.pretrain.checkpoint import checkpoint_files, checkpoints, described, stock_checkpoints
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.data.tokenizers import Tokenizer
from megatron_npu.pretrain.flags import derive
from megatron_npu.pretrain.flags.checks import machine
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import ModelFlags, TokenizerFlags
from megatron_npu.pretrain.model import gpt as model
from megatron_npu.pretrain.run import host_memory, initialize, layout

_ANOTHER = (
    f"Write the iteration of an undamaged checkpoint to {checkpoint_files.TRACKER}; "
    "`megatron-npu checkpoint verify` checks all of them."
)


@contextlib.contextmanager
def restored(
    load: str,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    share: Callable[[Mapping[str, Any]], dict[str, object]] | None = None,
    widened_by_caller: bool = False,
    **changes: object,
) -> Iterator[tuple[Flags, torch.nn.Module, Tokenizer]]:
    """Load a trained model with its flags and tokenizer, in evaluation mode, for use inside the ``with``
    block.

    The weights are assembled regardless of the layout in which they were trained.

    Args:
        load: directory of checkpoints of the trainer or of a stock script.
        vocab_file, merge_file: current paths of the tokenizer's files, if they have been moved.
        share: maps the flags of the training run to the layout in which several processes share the model
            (``layout.of_all_processes``) or have copies of it (``layout.copies``). If None, this process has
            the whole model.
        widened_by_caller: keep the weights in their trained dtype although the modules expect fp32; the
            caller converts each weight when it is used.
        changes: arguments of the run to override, by name.

    Raises:
        UsageError: there is no such checkpoint, the tokenizer's files or megatron-core are missing, or there
            is not enough memory.
    """
    plugin.install()
    machine.require_megatron_core()
    found = stock_checkpoints.existing(load)
    trained = described.arguments_of(found)
    shared = layout.ALONE if share is None else share(trained)
    args = Flags(**{**trained, **changes, **shared})
    stored = model.dtype(args)
    if widened_by_caller:
        derive.widened(args)
    derive.grouped_experts(args)
    derive.tokenizer_files(args, load, {"vocab_file": vocab_file, "merge_file": merge_file})
    words = TokenizerFlags.of(args)
    tokenizer = tokenizers.build(words)
    if "tokenizer_vocab_size" not in args:  # a stock script does not write it down
        derive.vocabulary(args, tokenizers.model_vocabulary(words, tokenizer))
        stock_checkpoints.require_vocabulary(found, args.tokenizer_vocab_size)
    else:
        _require_vocabulary(tokenizer, args.tokenizer_vocab_size, exactly=not args.vocab_size)
    derive.padded_vocab_size(args)
    args.freeze()
    with initialize.session(args):
        config = model.transformer_config(args)
        config.perform_initialization = False  # every weight is read
        first, last = model.at_ends()
        gpt = model.gpt(ModelFlags.of(args), config, None, first, last)
        if widened_by_caller:
            for parameter in gpt.parameters():
                parameter.data = torch.empty_like(parameter, dtype=stored)
        _require_memory(gpt, load)
        gpt = model.on_device(args, config, gpt)
        with checksums.verifying(found.path, _ANOTHER):
            checkpoints.load_weights([gpt], found.path)
        stranger_weights.tell_of_loaded(found.path, [gpt])
        with without_prediction([model.unwrap(gpt)]):
            yield args, gpt.eval(), tokenizer


def _require_vocabulary(tokenizer: Tokenizer, expected: int, *, exactly: bool) -> None:
    """Reject a tokenizer that differs from the one with which the model was trained.

    Args:
        tokenizer: the tokenizer that was created from the current files.
        expected: the number of tokens that the model was trained with.
        exactly: whether fewer tokens are rejected too, as without --vocab-size.

    Raises:
        UsageError: the tokenizer has a different number of tokens.
    """
    fits = tokenizer.vocab_size == expected if exactly else tokenizer.vocab_size <= expected
    if not fits:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model was trained with {expected}",
            remedy="With --vocab-file and --merge-file, pass the files that training used.",
        )


def _require_memory(module: torch.nn.Module, load: str) -> None:
    """Check that the weights fit into host memory if they are loaded into host memory.

    Raises:
        UsageError: the weights do not fit.
    """
    if devices.current().is_host:
        size = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
        host_memory.require(size, f"the model in {load}")
