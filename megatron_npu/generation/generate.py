"""``megatron-npu generate``: generate text for a prompt, a file of prompts, or a conversation.

Several processes can share one model (torchrun --nproc-per-node N -m megatron_npu generate) without changing
the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megatron_npu.base import files, output_files
from megatron_npu.base.arg_parser import Parser, integer, number, positive, whole
from megatron_npu.base.errors import UsageError
from megatron_npu.generation import conversation, sample_files, trained_model
from megatron_npu.generation.sampling import leader
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.generation.trained_model import SharedModelFlags, TrainedModel
from megatron_npu.pretrain.checkpoint.restore import restored

_DEFAULT = Options()


@dataclass(frozen=True)
class GenerateFlags(SharedModelFlags):
    """The flags of the command, besides those from which the sampling ``Options`` are made."""

    prompt: str | None
    num_samples: int | None
    sample_input_file: str | None
    sample_output_file: str | None
    genfile: str | None
    output: str | None
    micro_batch_size: int
    num_tokens: int | None
    out_seq_length: int | None


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser("megatron-npu generate", description=__doc__)
    add = result.add_argument
    trained_model.add_flags(add)
    add("--prompt", metavar="TEXT", help="text to continue")
    add(
        "--num-samples",
        type=whole,
        help=(
            "number of samples: continuations of --prompt, or unconditional samples if there is no "
            "prompt; 0 starts an interactive conversation"
        ),
    )
    add("--sample-input-file", metavar="FILE", help="file with one prompt per line")
    add(
        "--sample-output-file",
        metavar="FILE",
        help="JSON-lines file for the continuations (default: the input file's name plus .out)",
    )
    add("--genfile", metavar="FILE", help="write the samples to FILE as JSON lines instead of printing them")
    add("--output", metavar="FILE", help="write the text to FILE instead of printing it")
    add("--micro-batch-size", type=positive, default=8, help="maximum number of samples to generate at once")
    add_sampling(add)
    return result


def add_sampling(add: trained_model.Add) -> None:
    """Add the sampling flags to a parser."""
    add(
        "--num-tokens",
        type=integer,
        help=(
            f"maximum number of tokens to generate (default: {_DEFAULT.num_tokens}, or as many as "
            "--out-seq-length allows)"
        ),
    )
    add(
        "--out-seq-length",
        type=integer,
        help=(
            "maximum total number of tokens in the prompt and its continuation (default: the number of "
            "positions of the model)"
        ),
    )
    default = _DEFAULT.temperature
    add(
        "--temperature",
        type=number,
        default=default,
        help="temperature by which the logits are divided; 0 selects greedy decoding",
    )
    add("--greedy", action="store_true", help="use greedy decoding, like --temperature 0")
    add(
        *("--top-k", "--top_k"),
        type=integer,
        default=0,
        help="sample from the N most likely tokens; 0 means no limit",
    )
    add(
        *("--top-p", "--top_p"),
        type=number,
        default=0.0,
        help="sample from the smallest set of tokens with at least this total probability; 0 means no limit",
    )
    add("--seed", type=integer, default=_DEFAULT.seed, help="random seed; sample i uses seed + i")
    add(
        "--recompute",
        action="store_true",
        help="recompute the whole sequence for every token instead of using the KV cache; the "
        "output is the same except for rounding",
    )


def options_of(given: argparse.Namespace) -> Options:
    """Return the sampling options that the flags select.

    Raises:
        UsageError: a value is out of range.
    """
    some = {"num_tokens": given.num_tokens} if given.num_tokens is not None else {}
    if given.num_tokens is None and given.out_seq_length is not None:
        some = {"num_tokens": max(given.out_seq_length, 1)}
    return Options(
        longest=given.out_seq_length,
        temperature=0.0 if given.greedy else given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        recompute=given.recompute,
        **some,
    )


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: the checkpoint does not exist, or a prompt or value does not fit the model.
    """
    parsed = parser().parse_args(argv)
    given, options = GenerateFlags.of(parsed), options_of(parsed)
    _check(given)
    talks = given.num_samples == 0
    patience = {"distributed_timeout_minutes": int(leader.PATIENCE.total_seconds()) // 60} if talks else {}
    with trained_model.loaded(given, **patience) as model:
        if talks:
            with leader.leading(model.sampler) as first:
                if first is not None:
                    conversation.talk(model, first, options)
        elif given.sample_input_file is not None:
            _continue_file(given.sample_input_file, given, model, options)
        else:
            _draw(given, model, options)
    return 0


def _check(given: GenerateFlags) -> None:
    """Reject invalid combinations of flags before the model is loaded."""
    ways = [flag for flag in ("prompt", "sample_input_file") if getattr(given, flag) is not None]
    if not ways and given.num_samples is None:
        raise UsageError(
            "neither a prompt nor a number of samples was given. Pass --prompt TEXT, --sample-input-file "
            "FILE, or --num-samples N (0 starts an interactive conversation)."
        )
    if len(ways) > 1 or (given.num_samples == 0 and ways):
        both = "--prompt and --sample-input-file" if len(ways) > 1 else f"--num-samples 0 and --{ways[0]}"
        raise UsageError(f"{both.replace('_', '-')} are mutually exclusive. Remove one.")
    inputs = [given.sample_input_file, *trained_model.inputs(given.load, given.vocab_file, given.merge_file)]
    output_files.require_writable(given.genfile, given.output, given.sample_output_file, inputs=inputs)


def _draw(given: GenerateFlags, model: TrainedModel, options: Options) -> None:
    """Generate texts that continue one prompt, or texts without a prompt.

    Print the texts or write them to a file.
    """
    prompt = [model.sampler.end] if given.prompt is None else model.prompt(given.prompt)
    _require_room(given, prompt, model)
    samples = model.sampler.sample([prompt] * (given.num_samples or 1), options, batch=given.micro_batch_size)
    if dist.get_rank() == 0:
        _hand_out(given, model, samples)


def _hand_out(given: GenerateFlags, model: TrainedModel, samples: list[Sample]) -> None:
    if given.genfile:
        sample_files.write(given.genfile, (sample_files.record(model, sample) for sample in samples))
        print(f"{len(samples)} sample{'s' if len(samples) > 1 else ''} in {given.genfile}")
        return
    texts = [model.text(sample) for sample in samples]
    if len(texts) > 1:
        texts = [f"----- {number} of {len(texts)} -----\n{text}" for number, text in enumerate(texts, 1)]
    if given.output:
        files.write(given.output, "\n".join(texts) + "\n")
    else:
        print("\n".join(texts))


def _prompt_of_line(given: GenerateFlags, model: TrainedModel, line: int, prompt: str) -> list[int]:
    try:
        ids = model.prompt(prompt)
        _require_room(given, ids, model)
    except UsageError as error:
        told = f"{given.sample_input_file}, line {line}: {error.given}"
        raise UsageError(told, error.expected, error.remedy) from error
    return ids


def _continue_file(file: str, given: GenerateFlags, model: TrainedModel, options: Options) -> None:
    """Generate a continuation for each line of a file, and write the prompts with their continuations."""
    output = given.sample_output_file or given.genfile or f"{file}.out"
    prompts = sample_files.read_prompts(file)
    ids = [_prompt_of_line(given, model, line, prompt) for line, prompt in enumerate(prompts, 1)]
    each = given.num_samples or 1
    samples = model.sampler.sample(
        [prompt for prompt in ids for _ in range(each)], options, batch=given.micro_batch_size
    )
    if dist.get_rank() == 0:
        records = [
            {"prompt": prompts[number // each], **sample_files.record(model, sample)}
            for number, sample in enumerate(samples)
        ]
        sample_files.write(output, records)
        print(f"{len(samples)} sample{'s' if len(samples) > 1 else ''} in {output}")


def _require_room(given: GenerateFlags, prompt: list[int], model: TrainedModel) -> None:
    """Reject a number of tokens that exceeds the number of the model's positions."""
    positions, length = model.sampler.positions, len(prompt)
    if given.out_seq_length is not None and not length < given.out_seq_length <= positions:
        raise UsageError(
            f"--out-seq-length must be larger than the prompt, which has {length} tokens, and at most the "
            f"model's {positions} positions, but got {given.out_seq_length}. Change it, or shorten the "
            "prompt."
        )
    if given.num_tokens is not None and length + given.num_tokens > positions:
        raise UsageError(
            f"the prompt has {length} tokens and --num-tokens is {given.num_tokens}, which together exceed "
            f"the model's {positions} positions. Pass --num-tokens {positions - length} or a shorter prompt."
        )


def generate(
    load: str, prompt: str, *, vocab_file: str | None = None, merge_file: str | None = None, **options: object
) -> str:
    """Return a prompt and its continuation, up to an end-of-document token, using only this process.

    Args:
        load: the folder that was given to ``--save``.
        prompt: a non-empty text. For a NullTokenizer, it consists of numbers separated by spaces.
        vocab_file, merge_file: the current paths of the tokenizer's files, if they have moved.
        options: values for the fields of ``Options``.

    Raises:
        UsageError: the checkpoint does not exist, or the model cannot process a prompt or value.
    """
    wanted = replace(_DEFAULT, **options)  # type: ignore[arg-type]  # mypy knows no names of keywords here
    with restored(load, vocab_file, merge_file) as (args, gpt, tokenizer):
        model = trained_model.of(args, gpt, tokenizer)
        (sample,) = model.sampler.sample([model.prompt(prompt)], wanted)
        return model.text(sample)
