"""``megatron-npu generate``: text from a checkpoint of the embedded driver, in one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_npu import files
from megatron_npu.arg_parser import Parser, integer, number
from megatron_npu.errors import UsageError
from megatron_npu.generation.options import Options
from megatron_npu.generation.sampler import Sampler
from megatron_npu.tokenization import flags
from megatron_npu.training import initialize
from megatron_npu.training.restore import restored


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    result = Parser("megatron-npu generate", description=__doc__)
    add = result.add_argument
    add("--load", required=True, metavar="DIR", help="what --save was; the newest checkpoint is taken")
    add("--prompt", required=True, metavar="TEXT", help="the text to go on from")
    add("--num-tokens", type=integer, default=64, help="tokens to add at most")
    add("--temperature", type=number, default=1.0, help="logits are divided by it; 0: the likeliest token")
    add("--top-k", type=integer, default=0, help="draw among the N likeliest tokens; 0: all")
    add("--top-p", type=number, default=0.0, help="draw among the fewest tokens that have this probability")
    add("--seed", type=integer, default=1234, help="of the random draws")
    flags.add_gpt2_files(add, " (default: as in training)")
    add("--output", metavar="FILE", help="write the text there instead of printing it")
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: no such checkpoint, or a prompt or number that does not fit the model.
    """
    args = parser().parse_args(argv)
    initialize.silence_known_warnings()
    text = generate(
        args.load,
        args.prompt,
        num_tokens=args.num_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
    )
    if args.output:
        files.write(args.output, text + "\n")
    else:
        print(text)
    return 0


def generate(
    load: str,
    prompt: str,
    *,
    num_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    seed: int = 1234,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> str:
    """Return the prompt and what the model adds to it, up to an end of document.

    Args:
        load: directory that a run saved into.
        prompt: not empty; for a NullTokenizer numbers with blanks between.
        num_tokens: tokens to add at most.
        temperature: logits are divided by it; 0 takes the likeliest token, as ``top_k`` 1 does.
        top_k: draw among so many likeliest tokens; 0: all.
        top_p: draw among the fewest tokens whose probabilities sum to it; 0: all.
        seed: of the draws; on one device the same seed gives the same text.
        vocab_file, merge_file: where the tokenizer's files are now, if they have moved.

    Raises:
        UsageError: no such checkpoint, or a prompt or number that does not fit the model.
    """
    options = Options(num_tokens=num_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with restored(load, vocab_file, merge_file) as (args, gpt, tokenizer):
        ids = tokenizer.encode(prompt)
        if not ids:
            raise UsageError("an empty --prompt", "at least one token", "Give some text.")
        longest = args.max_position_embeddings
        if len(ids) + num_tokens > longest:
            raise UsageError(
                f"a prompt of {len(ids)} tokens and --num-tokens {num_tokens}",
                f"together at most the model's {longest} positions",
                f"Give --num-tokens {max(longest - len(ids), 0)} or a shorter prompt.",
            )
        (sample,) = Sampler(gpt, tokenizer, args.tokenizer_vocab_size).sample([ids], options)
        return tokenizer.decode(sample.ids())
