"""``megatron-npu lambada``: measure how often a checkpoint predicts the last word of a passage.

The task and the first printed line are the same as with Megatron-LM's ``tasks/main.py --task LAMBADA``. The
second line has the perplexity as computed by lm-eval. Under torchrun, the processes divide the passages among
themselves.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base import output_files
from megatron_npu.base.arg_parser import Parser, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation.passages import Cut, Example, read_examples
from megatron_npu.generation import sample_files, trained_model
from megatron_npu.generation.sampling.sampler import Sampler
from megatron_npu.options.attention_flags import AttentionFlags, add_attention_flags
from megatron_npu.options.shared_flags import add_shared
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.run import initialize, layout


class Found(NamedTuple):
    """The model's result for one passage.

    Attributes:
        example: the passage.
        correct: whether the most likely token is the expected one at every position.
        logprob: the natural logarithm of the probability of all expected tokens.
    """

    example: Example
    correct: bool
    logprob: float


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    result = Parser("megatron-npu lambada", description=__doc__)
    add = result.add_argument
    trained_model.add_checkpoint(add)
    add(
        "--valid-data",
        required=True,
        metavar="FILE",
        help="JSON-lines file with one passage per line, under the key `text`",
    )
    add("--strict-lambada", action="store_true", help="predict the whole last word instead of its last token")
    add(
        "--lm-eval-cut",
        action="store_true",
        help=("predict the whole last word, separated from its context as in lm-eval's task lambada_openai"),
    )
    add("--results", metavar="FILE", help="write the result of each passage to FILE as JSON lines")
    add("--micro-batch-size", type=positive, default=4, help="number of passages per forward pass")
    add_shared(add, "--use-flash-attn")
    add_attention_flags(result)
    result.set_defaults(**dict.fromkeys(AttentionFlags.names()))  # those of the run
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: the checkpoint or file does not exist, or a passage does not fit the model.
    """
    args = parser().parse_args(argv)
    if args.strict_lambada and args.lm_eval_cut:
        raise UsageError("--strict-lambada and --lm-eval-cut are mutually exclusive. Remove one.")
    inputs = [args.valid_data, *trained_model.inputs(args.load, args.vocab_file, args.merge_file)]
    output_files.require_writable(args.results, inputs=inputs)
    initialize.silence_known_warnings()
    cut: Cut = "lm-eval" if args.lm_eval_cut else "word" if args.strict_lambada else "token"
    rows = found(
        args.load,
        args.valid_data,
        cut=cut,
        batch=args.micro_batch_size,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        **_changes(args),
    )
    if int(os.environ.get("RANK", "0")):
        return 0  # the first process prints what all have found
    right, total = _counts(rows)
    figures = f"number correct: {right:.4E} | total examples: {total:.4E} | avg accuracy: {right / total:.4E}"
    print(f" validation results on LAMBADA | {figures}")
    print(f" validation results on LAMBADA | perplexity: {perplexity(rows):.4E}")
    if args.results:
        sample_files.write(args.results, map(_record, range(1, total + 1), rows))
    return 0


def _record(line: int, row: Found) -> dict[str, Any]:
    """Return the JSON record of a passage, in which tokens are represented by their ids."""
    return {
        "line": line,
        "correct": row.correct,
        "log_likelihood": row.logprob,
        "context_tokens": len(row.example.context),
        "answer": row.example.answer,
    }


def _counts(rows: Sequence[Found]) -> tuple[int, int]:
    return sum(row.correct for row in rows), len(rows)


def perplexity(rows: Sequence[Found]) -> float:
    """Return the exponential of the mean negative log-likelihood of the answers, or infinity if it overflows.

    Each passage is counted once.
    """
    try:
        return math.exp(-sum(row.logprob for row in rows) / len(rows))
    except OverflowError:
        return math.inf


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of the training run that the command line overrides."""
    given = {name: getattr(args, name) for name in AttentionFlags.names()}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes |= trained_model.CheckpointFlags.of(args).precision()
    if args.use_flash_attn:
        changes["attention_backend"] = "flash"
    return changes


def accuracy(
    load: str,
    file: str,
    *,
    strict: bool = True,
    batch: int = 4,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    **changes: Any,
) -> tuple[int, int]:
    """Return the number of passages that the model completes correctly, and the number of all passages.

    Under torchrun, each process holds the whole model and evaluates a part of the passages. All processes
    return the same result.

    Args:
        load: the folder that was given to ``--save``.
        file: a file of JSON lines with the key ``text``.
        strict: whether to predict the whole last word, tokenized separately. If False, the last token of the
            passage is predicted.
        batch: the number of passages per forward pass, which does not affect the results.
        vocab_file, merge_file: the current paths of the tokenizer's files, if they have moved.
        changes: the arguments of the training run to override, by name.

    Raises:
        UsageError: the checkpoint or file does not exist, or a passage does not fit the model.
    """
    cut: Cut = "word" if strict else "token"
    rows = found(load, file, cut=cut, batch=batch, vocab_file=vocab_file, merge_file=merge_file, **changes)
    return _counts(rows)


def found(
    load: str,
    file: str,
    *,
    cut: Cut = "word",
    batch: int = 4,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    **changes: Any,
) -> list[Found]:
    """Return the result for each passage in ``file``; see ``accuracy`` and ``read_examples``.

    Raises:
        UsageError: the checkpoint or file does not exist, a passage does not fit the model, or logits are NaN
            or infinite.
    """
    with restored(load, vocab_file, merge_file, layout.copies, **changes) as (args, gpt, tokenizer):
        examples = read_examples(file, tokenizer, cut=cut, longest=args.max_position_embeddings)
        sampler = Sampler(gpt, tokenizer, args.tokenizer_vocab_size)
        share = range(args.rank, len(examples), args.world_size)
        some = [examples[place] for place in share]
        scores = sampler.score([[*c, *a] for c, a in some], [len(c) for c, _ in some], batch=batch)
        told = torch.zeros(len(examples), 2)
        for place, score in zip(share, scores, strict=True):
            told[place] = torch.tensor([all(score.greedy), math.fsum(score.logprobs)])
        told = told.to(devices.current().torch_device())
        dist.all_reduce(told)  # each passage is 0 but in one process
        return [
            Found(example, bool(correct), logprob)
            for example, (correct, logprob) in zip(examples, told.tolist(), strict=True)
        ]
