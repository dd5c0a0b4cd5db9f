"""``megatron-npu lambada``: how often a checkpoint of the embedded driver knows a passage's last word.

The task is that of Megatron-LM's ``tasks/main.py --task LAMBADA``, and so is the line that is printed. Under
torchrun the processes share the passages out.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base import files
from megatron_npu.base.arg_parser import Parser, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.generation import trained_model
from megatron_npu.options.attention_flags import AttentionFlags, add_attention_flags
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.data.tokenizers import Tokenizer, continuation
from megatron_npu.pretrain.run import initialize, layout


class Example(NamedTuple):
    """A passage: the tokens that the model reads, and those that it has to find, all of them."""

    context: list[int]
    answer: list[int]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    result = Parser("megatron-npu lambada", description=__doc__)
    add = result.add_argument
    trained_model.add_checkpoint(add)
    add("--valid-data", required=True, metavar="FILE", help="JSON lines with a passage as text")
    add("--strict-lambada", action="store_true", help="ask for the whole last word, not for its last token")
    add("--micro-batch-size", type=positive, default=4, help="passages read at once")
    add("--use-flash-attn", action="store_true", help="= --attention-backend flash")
    add_attention_flags(result)
    result.set_defaults(**dict.fromkeys(AttentionFlags.names()))  # those of the run
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: no such checkpoint or file, or a passage that does not fit the model.
    """
    args = parser().parse_args(argv)
    initialize.silence_known_warnings()
    right, total = accuracy(
        args.load,
        args.valid_data,
        strict=args.strict_lambada,
        batch=args.micro_batch_size,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        **_changes(args),
    )
    if int(os.environ.get("RANK", "0")):
        return 0  # the first process prints what all have found
    figures = f"number correct: {right:.4E} | total examples: {total:.4E} | avg accuracy: {right / total:.4E}"
    print(f" validation results on LAMBADA | {figures}")
    return 0


def _changes(args: argparse.Namespace) -> dict[str, object]:
    """Return the flags of the run that the command line changes."""
    given = {name: getattr(args, name) for name in AttentionFlags.names()}
    changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    changes |= trained_model.precision(args)
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
    """Return how many passages of ``file`` the model completes, and how many there are.

    Under torchrun each process has the whole model and reads its share of the passages; all return the same.

    Args:
        load: directory that a run saved into.
        file: JSON lines with the key ``text``.
        strict: the whole last word counts, cut into tokens on its own; else the last token of the passage.
        batch: passages that are read at once; the figures do not depend on it.
        vocab_file, merge_file: where the tokenizer's files are now, if they have moved.
        changes: flags of the run to be changed, by their names in its arguments.

    Raises:
        UsageError: no such checkpoint or file, or a passage that does not fit the model.
    """
    with restored(load, vocab_file, merge_file, layout.copies, **changes) as (args, gpt, tokenizer):
        examples = read_examples(file, tokenizer, strict=strict, longest=args.max_position_embeddings)
        share = examples[args.rank :: args.world_size]
        batches = [share[start : start + batch] for start in range(0, len(share), batch)]
        right = torch.tensor(sum(_num_correct(gpt, some, tokenizer.eod) for some in batches))
        right = right.to(devices.current().torch_device())
        dist.all_reduce(right)
        return int(right), len(examples)


def read_examples(file: str, tokenizer: Tokenizer, *, strict: bool, longest: int) -> list[Example]:
    """Return the passages of a file, each with the last ``longest`` tokens before the last one to be found.

    How many lost tokens at their beginning is printed, by the first process.

    Raises:
        UsageError: no file, no passages, a line that is not one, or a passage too short.
    """
    try:
        lines = files.lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--valid-data {file}: {error}", "JSON lines", "Correct the path.") from error
    examples, longer = [], 0
    for number, line in enumerate(lines, 1):
        try:
            example = _example(json.loads(line)["text"], tokenizer, strict)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            expected = 'a JSON object with a passage of two words or more as "text"'
            raise UsageError(f"{file}, line {number}: {line[:40]!r}", expected, "Correct it.") from error
        asked = len(example.answer)
        room = longest + 1 - asked  # for the context
        if not example.context or room < 1:
            raise UsageError(
                f"{file}, line {number}: {len(example.context)} tokens and a last word of {asked}",
                f"at least one token before the word, and both within the model's {longest} positions",
                "Leave it out, or take a model that reads longer texts.",
            )
        longer += len(example.context) > room
        examples.append(Example(example.context[-room:], example.answer))
    if not examples:
        raise UsageError(f"--valid-data {file}: no passages", "at least one line", "Correct the path.")
    if longer and not int(os.environ.get("RANK", "0")):
        print(f" > {longer} passages are longer than {longest} tokens: the last ones of each are read")
    return examples


def _example(text: str, tokenizer: Tokenizer, strict: bool) -> Example:
    if not strict:
        ids = tokenizer.encode(text)
        return Example(ids[:-1], ids[-1:])
    word = text.split()[-1]
    context = text[: text.rfind(word)].strip()
    return Example(tokenizer.encode(context), continuation(tokenizer, context, " " + word))


@torch.no_grad()
def _num_correct(gpt: torch.nn.Module, examples: list[Example], padding: int) -> int:
    """Return how many of the examples have the likeliest token at every place of their answers."""
    length = max(len(context) + len(answer) for context, answer in examples)
    rows = [[*context, *answer] for context, answer in examples]
    tokens = torch.tensor([row + [padding] * (length - len(row)) for row in rows])
    inputs = tokens[:, :-1].to(devices.current().torch_device())
    positions = torch.arange(length - 1, device=inputs.device).expand_as(inputs)
    found = gpt(inputs, positions, None, runtime_gather_output=True).argmax(-1).cpu()  # [b, s]
    return sum(
        found[row, len(context) - 1 :][: len(answer)].tolist() == answer
        for row, (context, answer) in enumerate(examples)
    )
