"""A trained model from its checkpoint, in one process: for text, LAMBADA and conversion."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator

import torch

from megatron_npu import plugin
from megatron_npu.training import (
    checkpoint,
    checkpoint_files,
    derive,
    initialize,
    model,
    stock_checkpoints,
    tokenizers,
)
from megatron_npu.training.tokenizers import Tokenizer

# Flags of a run's layout and of its training, for one process that does not train.
_ALONE: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "world_size": 1,
    "rank": 0,
    "local_rank": 0,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}


@contextlib.contextmanager
def restored(
    load: str, vocab_file: str | None = None, merge_file: str | None = None, **changes: object
) -> Iterator[tuple[Namespace, torch.nn.Module, Tokenizer]]:
    """Hold a trained model in evaluation mode, with its flags and tokenizer, in this one process.

    Whatever the layout that it was trained in, it is put together here.

    Args:
        load: directory that a run saved into, the driver's or a stock script's.
        vocab_file, merge_file: where the tokenizer's files are now, if they have moved.
        changes: flags of the run to be changed, by their names in its arguments.

    Raises:
        UsageError: no such checkpoint, or its tokenizer's files are missing.
    """
    plugin.install()
    found = stock_checkpoints.existing(load)
    args = Namespace(**{**found.arguments, **changes, **_ALONE})
    for name, given in (("vocab_file", vocab_file), ("merge_file", merge_file), ("tokenizer_model", None)):
        setattr(args, name, given or checkpoint_files.relocated(load, getattr(args, name)))
    tokenizer = tokenizers.build(args)
    if "tokenizer_vocab_size" not in args:  # a stock script does not write it down
        args.tokenizer_vocab_size = tokenizers.model_vocabulary(args, tokenizer)
        stock_checkpoints.require_vocabulary(found, args)
    derive.padded_vocab_size(args)
    with initialize.session(args):
        config = model.transformer_config(args)
        gpt = model.on_device(args, config, model.gpt(args, config, None, True, True))
        checkpoint.load_weights([gpt], found.path)
        yield args, gpt.eval(), tokenizer
