"""Create a Sampler from a checkpoint, and declare the command-line flags for this."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.base.arg_parser import positive, whole
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import flags
from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.generation import chat_template
from megatron_npu.generation.sampling import host_layout
from megatron_npu.generation.sampling.sampler import Sample, Sampler
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import Part, TokenizerFlags
from megatron_npu.pretrain.run import initialize, layout

Add = Callable[..., Any]  # add_argument of a parser
Share = Callable[[Mapping[str, Any]], dict[str, object]]

# Sizes that Megatron's own script wants to be told, though the checkpoint knows them.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def add_flags(add: Add) -> None:
    """Add the flags for a checkpoint, its tokenizer, its precision and its layout."""
    add_checkpoint(add)
    add("--tensor-model-parallel-size", type=positive, help="tensor-parallel size")
    add("--pipeline-model-parallel-size", type=positive, help="number of pipeline stages")
    for name in _SHAPE:
        add(
            f"--{name.replace('_', '-')}",
            type=whole,
            help="accepted for compatibility; must match the checkpoint, whose value is the default",
        )
    add("--seq-length", type=whole, help="has no effect; accepted for compatibility with Megatron's script")
    add(
        "--tokenizer-type",
        metavar="NAME",
        help="accepted for compatibility; must match the checkpoint's tokenizer, which is the default",
    )


def add_checkpoint(add: Add) -> None:
    """Add ``--load`` and the flags for tokenizer files and precision."""
    add(
        "--load",
        required=True,
        metavar="DIR",
        help="folder that training wrote with --save; its newest checkpoint is loaded",
    )
    flags.add_gpt2_files(add, " (default: the one used in training)")
    add("--fp16", action="store_true", help="compute in fp16 (default: the precision used in training)")
    add("--bf16", action="store_true", help="compute in bf16 (default: the precision used in training)")


def inputs(load: str, vocab_file: str | None, merge_file: str | None) -> list[Path]:
    """Return the files and folders that are read for the flags of ``add_checkpoint``."""
    given = [Path(file) for file in (vocab_file, merge_file) if file]
    return [*given, Path(load, checkpoint_files.TRACKER), *Path(load).glob("iter_*"), Path(load, "release")]


@dataclass(frozen=True)
class CheckpointFlags(Part):
    """The flags of ``add_checkpoint``, which select a checkpoint and the precision of its model."""

    load: str
    vocab_file: str | None
    merge_file: str | None
    fp16: bool
    bf16: bool

    def precision(self) -> dict[str, Any]:
        """Return the training arguments that ``--fp16`` or ``--bf16`` overrides.

        Raises:
            UsageError: both flags are given.
        """
        if self.fp16 and self.bf16:
            raise UsageError("--fp16 and --bf16 are mutually exclusive. Remove one.")
        return {"fp16": self.fp16, "bf16": self.bf16} if self.fp16 or self.bf16 else {}


@dataclass(frozen=True)
class SharedModelFlags(CheckpointFlags):
    """The flags of ``add_flags``, which also say how the processes of a command share the model.

    The sizes from ``num_layers`` on must be those of the checkpoint.
    """

    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    num_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    max_position_embeddings: int | None
    tokenizer_type: str | None


@dataclass(frozen=True)
class TrainedModel:
    """A model loaded from a checkpoint, which all processes of the command share.

    Attributes:
        args: the flags of the checkpoint's training run, with the layout of this command.
        sampler: the sampler for the model.
        tokenizer: the tokenizer of the model.
    """

    args: Flags
    sampler: Sampler
    tokenizer: Tokenizer

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt text.

        Raises:
            UsageError: the prompt is empty, not UTF-8, or too long.
        """
        ids = self.tokenizer.encode(text)
        if not ids:
            raise UsageError(
                "the prompt is empty, but it must have at least one token",
                remedy="Pass some text; for unconditional samples use --num-samples 1 without a prompt.",
            )
        self.sampler.check(ids)
        return ids

    def text(self, sample: Sample) -> str:
        """Return a sample, which is the prompt and its continuation, as text."""
        return self.tokenizer.decode(self.content(sample))

    def chat_template(self) -> chat_template.ChatTemplate | None:
        """Return the chat template of the model's tokenizer, or None if it has none.

        Raises:
            UsageError: the template is not valid Jinja.
        """
        return chat_template.of(TokenizerFlags.of(self.args))

    def content(self, sample: Sample) -> list[int]:
        """Return the token ids of the text in a sample.

        An end token that represents an empty prompt is omitted.
        """
        return sample.tokens if sample.prompt == [self.sampler.end] else sample.ids()


@contextlib.contextmanager
def loaded(given: SharedModelFlags, **changes: Any) -> Iterator[TrainedModel]:
    """Load the model that the flags of ``add_flags`` select, for use inside the ``with`` block.

    Args:
        given: the flags about the model.
        changes: the arguments of the training run to override, by name.

    Raises:
        UsageError: the checkpoint does not exist, has another shape, or cannot be partitioned as requested.
    """
    share = functools.partial(
        layout.of_all_processes,
        tensor=given.tensor_model_parallel_size,
        pipeline=given.pipeline_model_parallel_size,
    )
    with held(given, share, **changes) as model:
        _require_shape(given, model.args)
        yield model


@contextlib.contextmanager
def held(given: CheckpointFlags, share: Share, **changes: Any) -> Iterator[TrainedModel]:
    """Load the model that the flags of ``add_checkpoint`` select, for use inside the ``with`` block.

    Args:
        given: the flags about the model.
        share: how the processes of the command share the model; see ``restored``.
        changes: the arguments of the training run to override, by name.

    Raises:
        UsageError: the checkpoint does not exist, or cannot be partitioned as requested.
    """
    initialize.silence_known_warnings()
    changes |= given.precision()
    with restored(given.load, given.vocab_file, given.merge_file, share, **changes) as (args, gpt, tokenizer):
        yield of(args, gpt, tokenizer)


def of(args: Flags, gpt: torch.nn.Module, tokenizer: Tokenizer) -> TrainedModel:
    """Prepare a restored model for generation, and return it."""
    if devices.current().is_host:
        host_layout.lay_out_for_vectors(gpt)
    return TrainedModel(args, Sampler(gpt, tokenizer, args.tokenizer_vocab_size), tokenizer)


def _require_shape(given: SharedModelFlags, args: Flags) -> None:
    """Reject model sizes on the command line that differ from those of the checkpoint."""
    for name in (*_SHAPE, "tokenizer_type"):
        wanted, there = getattr(given, name), getattr(args, name)
        if wanted is not None and wanted != there:
            raise UsageError(
                f"--{name.replace('_', '-')} must be {there}, the checkpoint's value, but got {wanted}. "
                "Remove it, or load another checkpoint."
            )
