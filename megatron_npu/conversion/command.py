"""``megatron-npu convert``: checkpoints of Hugging Face to those of the embedded driver, and back."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_npu import checksums, files, plugin
from megatron_npu.arg_parser import Parser, number, positive
from megatron_npu.conversion import (
    carried_files,
    families,
    hf_files,
    model_card,
    tokenizer_files,
    verify,
    weights,
)
from megatron_npu.conversion.config import NAME as CONFIG
from megatron_npu.conversion.config import Config, read
from megatron_npu.conversion.families import Family
from megatron_npu.devices import malloc
from megatron_npu.errors import UsageError
from megatron_npu.tokenization import flags as tokenizer_flags
from megatron_npu.training import (
    arguments,
    checkpoint,
    checkpoint_description,
    checkpoint_files,
    host_memory,
    initialize,
    model,
    sharded_weights,
    stock_arguments,
    stock_checkpoints,
    torch_format,
    validation,
)
from megatron_npu.training.frozen_flags import Flags
from megatron_npu.training.restore import restored

FLAGS = "flags.txt"
_SIDES = ("hf", "megatron")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    result = Parser("megatron-npu convert", description=__doc__)
    add = result.add_argument
    add("--from", dest="origin", required=True, choices=_SIDES, help="what SOURCE is")
    add("--to", dest="target", required=True, choices=_SIDES, help="what DESTINATION becomes")
    add("source", metavar="SOURCE", help="hf: a folder with config.json; megatron: what --save was")
    add("destination", metavar="DESTINATION", help="a folder that does not exist yet")
    add("--dtype", choices=weights.DTYPES, help="type of the converted weights (default: as they are)")
    add(
        "--proof",
        choices=["logits", "tensors"],
        help="logits: run both models (default with transformers installed); tensors: compare weights alone",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=positive,
        default=128,
        help="pad the vocabulary to a multiple of N (to megatron)",
    )
    add(
        "--ckpt-format",
        choices=["torch_dist", "torch"],
        default="torch_dist",
        help="torch: a file for each rank, as Megatron-LM 285068c8 loads it (to megatron)",
    )
    add("--tensor-model-parallel-size", type=positive, default=1, help="of --ckpt-format torch")
    add("--pipeline-model-parallel-size", type=positive, default=1, help="of --ckpt-format torch")
    add(
        "--hf-weights",
        choices=list(hf_files.FORMATS),
        default=hf_files.SINGLE,
        help="form of the weights; pytorch_model.bin is a pickle, for programs that ask for it (to hf)",
    )
    add("--max-shard-gb", type=number, default=5.0, help="largest file of weights in 10^9 bytes (to hf)")
    add(
        "--tokenizer-type",
        choices=tokenizer_files.KINDS,
        help="tokenizer of the result; NullTokenizer: none (to megatron; default: what the files are for)",
    )
    add("--eos-token", metavar="TEXT", help="the token that ends a text, if no file names it (to megatron)")
    tokenizer_flags.add_gpt2_files(add, ", if it has moved since the training (from megatron)")
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: a model that cannot be converted, or one that the proof refutes; nothing has been written.
    """
    args = parser().parse_args(argv)
    _check(args)
    initialize.silence_known_warnings()
    _give_memory_back()
    plugin.install()
    convert = _to_megatron if args.target == "megatron" else _to_hf
    with files.new_folder(args.destination) as part, _enough_memory(args.source):
        for line in convert(args, part):
            print(line, flush=True)
    print(f"wrote {args.destination}")
    return 0


def _give_memory_back() -> None:
    """Let what one model has had be free for the next one, whose tensors have other sizes."""
    malloc.return_freed_memory()
    os.environ.setdefault("MEGATRON_NPU_KEEP_MEMORY", "0")
    malloc.map_each_tensor()


@contextlib.contextmanager
def _enough_memory(source: str) -> Iterator[None]:
    """Turn an allocation that has failed in the block into one line.

    Raises:
        UsageError: one has.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # torch's allocator
            raise
        raise UsageError(
            f"the conversion of {source} does not fit into memory",
            f"more than the {host_memory.available() / 1e9:.1f} GB that are available",
            "End other programs, raise a limit of this process (ulimit -v), or use a larger machine.",
        ) from error


def _check(args: Namespace) -> None:
    """Check what can be checked without reading the files."""
    if args.origin == args.target:
        raise UsageError(f"--from {args.origin} --to {args.target}", "two different sides", "Change one.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several processes", "one: any layout can load the result", "Start it without torchrun."
        )
    if args.make_vocab_size_divisible_by < 1 or args.max_shard_gb <= 0:
        raise UsageError("--make-vocab-size-divisible-by or --max-shard-gb", "a number above 0", "Change it.")
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    if (args.ckpt_format != "torch" or args.target != "megatron") and sizes != (1, 1):
        raise UsageError(
            f"tensor-parallel {sizes[0]} x pipeline-parallel {sizes[1]}",
            "sizes only with --to megatron --ckpt-format torch",
            "Leave them out: any layout can load the result.",
        )
    hf_files.require("safetensors", *(["huggingface_hub"] if args.target == "hf" else []))
    if args.proof == "logits" and not verify.has_reference():
        raise UsageError(
            "--proof logits, but transformers is not installed", "it", 'pip install "megatron_npu[hf]"'
        )
    destination = Path(args.destination)
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise UsageError(f"{destination} exists", "a new folder", "Give another name, or remove it.")


# -- to Megatron --------------------------------------------------------------------------------------------


def _to_megatron(given: Namespace, part: Path) -> Iterator[str]:
    """Write the checkpoint into ``part``; yield what there is to say."""
    source, final = Path(given.source), Path(given.destination).absolute()
    configuration = Config(read(source), source / CONFIG)
    family = families.of_config(configuration)
    vocabulary = configuration.number("vocab_size")
    multiple = given.make_vocab_size_divisible_by * given.tensor_model_parallel_size
    model_flags = [
        *family.flags(configuration),
        *("--make-vocab-size-divisible-by", str(multiple)),
    ]
    hf_folder = part / checkpoint_files.HF_FOLDER
    carried_files.copy(source, hf_folder)
    tokenizer = tokenizer_files.choose(
        source, hf_folder, vocabulary, kind=_tokenizer_kind(given, source), end=given.eos_token
    )
    args = _arguments(part, [*model_flags, *tokenizer.flags])
    found = weights.open_folder(source, family)
    weights.check_names(found, family, args)
    dtype = given.dtype or weights.common_dtype(found, family.weight_map(args))
    args = args.changed(bf16=dtype == "bf16", fp16=dtype == "fp16")
    needed = weights.memory_to_convert(found, family.weight_map(args), weights.DTYPES[dtype])
    host_memory.require(needed, f"the conversion of {source}")
    if given.ckpt_format == "torch":
        words = _save_for_ranks(given, args, family, found, part, final)
    else:
        _save(args, family, found, part, final)
        precision = [f"--{dtype}"] if dtype != "fp32" else []
        moved = [word.replace(str(part), str(final)) for word in tokenizer.flags]
        words = [*model_flags, *moved, *precision]
    line = _for_a_shell(words)
    files.write(part / FLAGS, line + "\n")
    yield from _verified(given, part, source, family, args, dtype)
    yield from tokenizer.said
    yield f"{args.tokenizer_type}; vocabulary {vocabulary}, padded to {args.padded_vocab_size}"
    yield f"the model's flags, also in {FLAGS}: {line}"


def _for_a_shell(words: list[str]) -> str:
    """Return a line that a shell and ``$(cat …)`` take alike: no quotes for a pattern of --moe-layer-freq."""
    return " ".join(word if word and set(word) <= set("[],01") else shlex.quote(word) for word in words)


def _tokenizer_kind(given: Namespace, source: Path) -> str | None:
    """Return the tokenizer that is asked for; 285068c8 has none but GPT-2's."""
    both = all((source / name).is_file() for name in ("vocab.json", "merges.txt"))
    return given.tokenizer_type or ("GPT2BPETokenizer" if given.ckpt_format == "torch" and both else None)


def _arguments(place: Path, flags: list[str]) -> Flags:
    """Return the driver's arguments for a model that is saved and not trained."""
    bare = ["--micro-batch-size", "1", "--train-iters", "0", "--save", str(place), "--no-plot"]
    without_state = ["--no-save-optim", "--no-save-rng"]
    return validation.check(arguments.parse([*bare, *without_state, *flags]))


def _filled(args: Namespace, family: Family, found: weights.Weights) -> torch.nn.Module:
    """Return the model on the host, with the weights of the files."""
    config = model.transformer_config(Namespace(**{**vars(args), "use_cpu_initialization": True}))
    config.perform_initialization = False  # every weight is filled
    gpt = model.gpt(args, config, None, True, True)
    weights.fill(dict(gpt.named_parameters()), found, family.weight_map(args))
    return gpt


def _save(args: Namespace, family: Family, found: weights.Weights, part: Path, final: Path) -> None:
    """Save the model as the driver does."""
    with initialize.session(args):
        # neither optimizer nor schedule; without arguments stock scripts up to core_v0.15 do not load it
        path = checkpoint.save(
            args,
            checkpoint.State([sharded_weights.GivenAway(_filled(args, family, found))], None, None),
            checkpoint.Position(),
            {"args": stock_arguments.to_stock(args)},
        )
        checkpoint_files.release(args.save, path)
        _name_final_paths(part, final)
    gc.collect()  # modules know each other, so that nothing else frees them


def _save_for_ranks(
    given: Namespace, args: Namespace, family: Family, found: weights.Weights, part: Path, final: Path
) -> list[str]:
    """Save the model in the files of ranks that 285068c8 loads; return its flags for them."""
    sizes = given.tensor_model_parallel_size, given.pipeline_model_parallel_size
    torch_format.require_writable(args, *sizes)
    moved = {
        name: getattr(args, name).replace(str(part), str(final)) for name in ("vocab_file", "merge_file")
    }
    named = Namespace(**{**vars(args), **moved})
    with initialize.session(args):
        weights_of_all = dict(_filled(args, family, found).named_parameters())
        torch_format.write(part, named, weights_of_all, *sizes)
    return torch_format.flags(named, *sizes)


def _name_final_paths(part: Path, final: Path) -> None:
    """Let the checkpoint's description name the places that its files are going to have."""
    found = checkpoint_description.existing(part)
    moved = {
        name: str(final / Path(path).relative_to(part))
        for name in ("save", "vocab_file", "merge_file", "tokenizer_model")
        if (path := found.arguments[name]) is not None
    }
    checkpoint_description.describe(found.path, replace(found, arguments=found.arguments | moved))
    checksums.renew(found.path / checkpoint_files.DESCRIPTION)


# -- to Hugging Face ----------------------------------------------------------------------------------------


def _to_hf(given: Namespace, part: Path) -> Iterator[str]:
    """Write the folder into ``part``; yield what there is to say."""
    root = Path(given.source)
    files_of_it = (given.vocab_file, given.merge_file)
    # each expert by itself, as Hugging Face has them
    with restored(str(root), *files_of_it, moe_grouped_gemm=False) as (args, module, tokenizer):
        family = families.of_arguments(args, tokenizer_files.model_type(root, args))
        dtype = given.dtype or ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
        values = family.config(args)
        extra_keys = tokenizer_files.copy_from_checkpoint(root, args, tokenizer, part)
        kind = str(weights.DTYPES[dtype]).removeprefix("torch.")
        named = {**extra_keys, **values, "dtype": kind, "torch_dtype": kind}  # transformers 5, and before
        files.write(part / CONFIG, json.dumps(named, indent=2, sort_keys=True) + "\n")
        parameters = dict(model.unwrap(module).named_parameters())
        _write(part, parameters, family, args, dtype, given.max_shard_gb, given.hf_weights)
        model_card.write(part, stock_checkpoints.existing(root), args, values, dtype)
    del module, parameters
    gc.collect()  # modules know each other, so that nothing else frees them
    yield from tokenizer_files.prove(tokenizer, part)
    yield from _verified(given, root, part, family, args, dtype)
    yield f"{values['architectures'][0]}; {args.tokenizer_type}"


def _write(
    part: Path,
    parameters: dict[str, torch.Tensor],
    family: Family,
    args: Namespace,
    dtype: str,
    shard_gb: float,
    form: str,
) -> None:
    kind = weights.DTYPES[dtype]
    shapes = {name: parameter.detach().to("meta", kind) for name, parameter in parameters.items()}
    planned = dict(weights.to_hf(shapes, family.weight_map(args)))
    tensors = (
        (name, tensor.cpu().to(kind)) for name, tensor in weights.to_hf(parameters, family.weight_map(args))
    )
    hf_files.write(part, tensors, planned, int(shard_gb * 1e9), form)


# -- both ---------------------------------------------------------------------------------------------------


def _verified(
    given: Namespace, megatron: Path, hf: Path, family: Family, args: Namespace, dtype: str
) -> Iterator[str]:
    """Prove the conversion and yield the line that says so.

    Raises:
        UsageError: the two sides differ.
    """
    logits = verify.has_reference() if given.proof is None else given.proof == "logits"
    result = verify.verify(
        megatron,
        hf,
        family,
        args,
        weights.DTYPES[dtype],
        logits=logits,
        vocab_file=given.vocab_file,
        merge_file=given.merge_file,
    )
    yield f"{result.tensors} tensors of type {dtype}, each equal to the bit on both sides"
    if logits:
        yield (
            f"logits of both models in fp32 on {result.tokens} tokens: largest difference "
            f"{result.difference:.2e}, largest logit {result.largest:.2e}, allowed {verify.BOUND:g} of it"
        )
    elif given.proof is None:
        yield 'transformers is not installed: the logits were NOT compared (pip install "megatron_npu[hf]")'
    else:
        yield "the logits were NOT compared (--proof tensors)"
