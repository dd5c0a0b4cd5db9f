"""Convert a Hugging Face folder to a checkpoint of the built-in trainer."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megatron_npu.base import files
from megatron_npu.checkpoint_files import checksums
from megatron_npu.conversion import carried_files, families, mapped_weights, verify
from megatron_npu.conversion.config import NAME as CONFIG
from megatron_npu.conversion.config import Config, read
from megatron_npu.conversion.family import POSITIONS, Family
from megatron_npu.conversion.request import Request
from megatron_npu.conversion.tokenizer import tokenizer_files
from megatron_npu.pretrain.checkpoint import (
    checkpoint_description,
    checkpoint_files,
    checkpoints,
    torch_format,
)
from megatron_npu.pretrain.checkpoint.weights import sharded_weights
from megatron_npu.pretrain.flags import arguments, stock_arguments, validation
from megatron_npu.pretrain.flags.checkpoint_parts import StoreFlags
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import ModelFlags
from megatron_npu.pretrain.model import gpt as model
from megatron_npu.pretrain.run import host_memory, initialize

FLAGS = "flags.txt"


def convert(request: Request, part: Path) -> Iterator[str]:
    """Write the checkpoint to ``part``, and yield log lines."""
    source, final = Path(request.source), Path(request.destination).absolute()
    configuration = Config(read(source), source / CONFIG)
    family = families.of_config(configuration)
    vocabulary = configuration.number("vocab_size")
    multiple = request.make_vocab_size_divisible_by * request.tensor_model_parallel_size
    model_flags = [
        *family.flags(configuration),
        *("--make-vocab-size-divisible-by", str(multiple)),
    ]
    hf_folder = part / checkpoint_files.HF_FOLDER
    carried_files.copy(source, hf_folder)
    tokenizer = tokenizer_files.choose(
        source, hf_folder, vocabulary, kind=_tokenizer_kind(request, source, family), end=request.eos_token
    )
    args = _arguments(part, [*model_flags, *tokenizer.flags])
    found = mapped_weights.open_folder(source, family)
    mapped_weights.check_names(found, family, args)
    dtype = request.dtype or mapped_weights.common_dtype(found, family.weight_map(args))
    args = args.changed(bf16=dtype == "bf16", fp16=dtype == "fp16")
    needed = mapped_weights.memory_to_convert(found, family.weight_map(args), mapped_weights.DTYPES[dtype])
    host_memory.require(needed, f"the conversion of {source}")
    if request.ckpt_format == "torch":
        _save_for_ranks(request, args, family, found, part, final)
    else:
        _save(args, family, found, part, final)
    if request.ckpt_format == "torch" and torch_format.is_of_285068c8(args):
        words = torch_format.flags(_moved(args, part, final), *request.sizes)
    else:
        precision = [f"--{dtype}"] if dtype != "fp32" else []
        moved = [word.replace(str(part), str(final)) for word in tokenizer.flags]
        words = [*model_flags, *moved, *precision, *_layout_flags(request)]
    line = _for_a_shell(words)
    files.write(part / FLAGS, line + "\n")
    yield from verify.told(request, part, source, family, args, dtype)
    yield from tokenizer.said
    yield f"{args.tokenizer_type}; vocabulary {vocabulary}, padded to {args.padded_vocab_size}"
    yield f"the flags of the model, which are also in {FLAGS}: {line}"
    if beyond := stock_arguments.beyond(args):
        yield (
            f"The scripts of Megatron-LM have no flags for: {'; '.join(beyond)}. The commands of "
            "megatron_npu support them"
        )


def _for_a_shell(words: list[str]) -> str:
    """Join words into a line that a shell and ``$(cat …)`` read in the same way.

    For this reason, patterns for --moe-layer-freq are not quoted.
    """
    return " ".join(word if word and set(word) <= set("[],01") else shlex.quote(word) for word in words)


def _tokenizer_kind(request: Request, source: Path, family: Family) -> str | None:
    """Return the type of tokenizer that is requested.

    For 285068c8, which can load GPT-2, the default is GPT-2's BPE.
    """
    both = all((source / name).is_file() for name in ("vocab.json", "merges.txt"))
    of_285068c8 = request.ckpt_format == "torch" and POSITIONS in family.traits
    return request.tokenizer_type or ("GPT2BPETokenizer" if of_285068c8 and both else None)


def _arguments(place: Path, flags: list[str]) -> Flags:
    """Return the built-in trainer's arguments for a model that is saved but not trained."""
    bare = ["--micro-batch-size", "1", "--train-iters", "0", "--save", str(place), "--no-plot"]
    without_state = ["--no-save-optim", "--no-save-rng"]
    return validation.check(arguments.parse([*bare, *without_state, *flags]))


def _filled(args: Flags, family: Family, found: mapped_weights.MappedWeights) -> torch.nn.Module:
    """Load the weights from the files into a model in host memory, and return the model."""
    config = model.transformer_config(args.changed(use_cpu_initialization=True))
    config.perform_initialization = False  # every weight is filled
    gpt = model.gpt(ModelFlags.of(args), config, None, True, True)
    mapped_weights.fill(dict(gpt.named_parameters()), found, family.weight_map(args))
    return gpt


def _save(args: Flags, family: Family, found: mapped_weights.MappedWeights, part: Path, final: Path) -> None:
    """Save the model as the built-in trainer saves it."""
    with initialize.session(args):
        # neither optimizer nor schedule; without arguments stock scripts up to core_v0.15 do not load it
        path = checkpoints.save(
            StoreFlags.of(args),
            checkpoints.State([sharded_weights.GivenAway(_filled(args, family, found))], None, None),
            checkpoints.Position(),
            {"args": stock_arguments.to_stock(args)},
        )
        checkpoint_files.release(args.save, path)
        _name_final_paths(part, final)
    gc.collect()  # modules know each other, so that nothing else frees them


def _layout_flags(request: Request) -> list[str]:
    """Return the flags that describe the layout of the per-rank files, to be appended to the model's
    flags.
    """
    if request.ckpt_format != "torch":
        return []
    tensor, pipeline = map(str, request.sizes)
    multiple = str(request.make_vocab_size_divisible_by)  # which scripts multiply by the first
    return [
        *("--make-vocab-size-divisible-by", multiple),
        *("--tensor-model-parallel-size", tensor),
        *("--pipeline-model-parallel-size", pipeline),
    ]


def _moved(args: Flags, part: Path, final: Path) -> Flags:
    """Return the arguments with the tokenizer files' final paths instead of their temporary ones."""
    paths = {name: getattr(args, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
    there = {name: path and path.replace(str(part), str(final)) for name, path in paths.items()}
    return args.changed(**there)


def _save_for_ranks(
    request: Request,
    args: Flags,
    family: Family,
    found: mapped_weights.MappedWeights,
    part: Path,
    final: Path,
) -> None:
    """Save the model as per-rank files, which 285068c8 or megatron-core's scripts can load."""
    torch_format.require_writable(args, *request.sizes)
    with initialize.session(args):
        weights_of_all = dict(_filled(args, family, found).named_parameters())
        torch_format.write(part, _moved(args, part, final), weights_of_all, *request.sizes)


def _name_final_paths(part: Path, final: Path) -> None:
    """Replace file paths in the checkpoint's description with the final paths."""
    found = checkpoint_description.existing(part)
    moved = {
        name: str(final / Path(path).relative_to(part))
        for name in ("save", "vocab_file", "merge_file", "tokenizer_model")
        if (path := found.arguments[name]) is not None
    }
    checkpoint_description.describe(found.path, replace(found, arguments=found.arguments | moved))
    checksums.renew(found.path / checkpoint_files.DESCRIPTION)
