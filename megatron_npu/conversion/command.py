"""``megatron-npu convert``: convert checkpoints between Hugging Face and the built-in trainer."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_npu import plugin
from megatron_npu.base import errors, files, malloc
from megatron_npu.base.arg_parser import Parser, number, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files.trackers import TRACKER
from megatron_npu.conversion import hf_files, mapped_weights, to_hf, to_megatron, verify
from megatron_npu.conversion.request import Request
from megatron_npu.conversion.tokenizer import tokenizer_files
from megatron_npu.data.tokenization import flags as tokenizer_flags
from megatron_npu.pretrain.run import host_memory, initialize

_SIDES = ("hf", "megatron")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser("megatron-npu convert", description=__doc__)
    add = result.add_argument
    add("--from", dest="origin", required=True, choices=_SIDES, help="format of SOURCE")
    add("--to", dest="target", required=True, choices=_SIDES, help="format of DESTINATION")
    add(
        "source",
        metavar="SOURCE",
        help=(
            "checkpoint to convert: with --from hf, a folder with config.json; with --from megatron, the "
            "folder that was passed to --save"
        ),
    )
    add("destination", metavar="DESTINATION", help="folder to create; it must not exist")
    add(
        "--dtype",
        choices=mapped_weights.DTYPES,
        help="dtype of the converted weights (default: keep the source's)",
    )
    add(
        "--proof",
        choices=["logits", "tensors"],
        help=(
            "how to verify the result: logits runs both models and compares their logits (the default if "
            "transformers is installed); tensors compares only the weights"
        ),
    )
    add(
        "--make-vocab-size-divisible-by",
        type=positive,
        default=128,
        help="pad the vocabulary to a multiple of N (only with --to megatron)",
    )
    add(
        "--ckpt-format",
        choices=["torch_dist", "torch"],
        default="torch_dist",
        help=(
            "checkpoint format to write; torch: one file per rank, as in Megatron-LM 285068c8 "
            "(only with --to megatron)"
        ),
    )
    add(
        "--tensor-model-parallel-size",
        type=positive,
        default=1,
        help="tensor-parallel size of the result (only with --ckpt-format torch)",
    )
    add(
        "--pipeline-model-parallel-size",
        type=positive,
        default=1,
        help="pipeline-parallel size of the result (only with --ckpt-format torch)",
    )
    add(
        "--hf-weights",
        choices=list(hf_files.FORMATS),
        default=hf_files.SINGLE,
        help=(
            "file format of the weights; pytorch_model.bin is a pickle file, for programs that require "
            "one (only with --to hf)"
        ),
    )
    add(
        "--max-shard-gb",
        type=number,
        default=5.0,
        help="maximum size of a weight file in 10^9 bytes (only with --to hf)",
    )
    add(
        "--tokenizer-type",
        choices=tokenizer_files.KINDS,
        help=(
            "tokenizer of the result; with NullTokenizer, no tokenizer is converted (only with "
            "--to megatron; default: detected from the source's files)"
        ),
    )
    add(
        "--eos-token",
        metavar="TEXT",
        help="end-of-text token to use if the source's files do not specify one (only with --to megatron)",
    )
    tokenizer_flags.add_gpt2_files(add, ", if it has moved since training (only with --from megatron)")
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: the model cannot be converted, or verification fails; nothing is written.
    """
    request = Request.of(parser().parse_args(argv))
    _check(request)
    initialize.silence_known_warnings()
    _give_memory_back()
    plugin.install()
    convert = to_megatron.convert if request.target == "megatron" else to_hf.convert
    with files.new_folder(request.destination) as part, _enough_memory(request.source):
        for line in convert(request, part):
            print(errors.printable(line), flush=True)
    print(f"wrote {request.destination}")
    return 0


def _give_memory_back() -> None:
    """Return freed memory of this process to the operating system.

    The next model's tensors have other sizes.
    """
    malloc.return_freed_memory()
    os.environ.setdefault("MEGATRON_NPU_KEEP_MEMORY", "0")
    malloc.map_each_tensor()


@contextlib.contextmanager
def _enough_memory(source: str) -> Iterator[None]:
    """Report a memory allocation that fails inside the ``with`` block as a one-line error.

    Raises:
        UsageError: an allocation failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # torch's allocator
            raise
        raise UsageError(
            f"the conversion of {source} does not fit into memory ("
            f"{host_memory.available() / 1e9:.1f} GB are available). Stop other programs, raise the memory "
            "limit of this process (ulimit -v), or use a machine with more memory."
        ) from error


def _check(request: Request) -> None:
    """Check the flags as far as this is possible without reading files."""
    if request.origin == request.target:
        raise UsageError(
            f"--from and --to must be different formats, but got --from {request.origin} --to "
            f"{request.target}. Change one of them."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "megatron-npu convert must run in a single process, but it was started in several. Start it "
            "without torchrun; any layout can load the result."
        )
    if request.make_vocab_size_divisible_by < 1 or request.max_shard_gb <= 0:
        raise UsageError(
            "--make-vocab-size-divisible-by and --max-shard-gb must be positive, but got "
            f"{request.make_vocab_size_divisible_by} and {request.max_shard_gb:g}. Correct the flag."
        )
    _check_sizes(request)
    hf_files.require("safetensors", *(["huggingface_hub"] if request.target == "hf" else []))
    if request.proof == "logits" and not verify.has_reference():
        raise UsageError(
            "--proof logits requires the package transformers, which is not installed. Install it: pip "
            'install "megatron_npu[hf]"'
        )
    _require_format(request)
    _require_new(Path(request.destination))


def _check_sizes(request: Request) -> None:
    sizes = request.sizes
    if (request.ckpt_format != "torch" or request.target != "megatron") and sizes != (1, 1):
        raise UsageError(
            f"parallel sizes (here tensor-parallel {sizes[0]} x pipeline-parallel {sizes[1]}) can be used "
            "only with --to megatron --ckpt-format torch. Remove them; any layout can load the result."
        )


def _require_format(request: Request) -> None:
    """Reject a folder of the other format, which --from and --to name the wrong way round."""
    files_of = {"hf": "config.json", "megatron": TRACKER}
    own, other = (Path(request.source, files_of[name]) for name in (request.origin, request.target))
    if other.is_file() and not own.exists():
        raise UsageError(
            f"--from {request.origin} requires {own.name} in {request.source}, but the folder contains "
            f"{other.name}",
            remedy=f"Use --from {request.target} --to {request.origin}, or correct the path.",
        )


def _require_new(destination: Path) -> None:
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise UsageError(
            f"{destination} already exists, but the destination must be a new folder. Use another name, or "
            "remove it."
        )
