"""``megatron-npu generate``: text from a checkpoint of the embedded driver, in one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from megatron_npu import devices, files
from megatron_npu.arg_parser import Parser, integer, number
from megatron_npu.errors import UsageError
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
    _check_sampling(num_tokens, temperature, top_k, top_p)
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
        generator = torch.Generator().manual_seed(seed)
        for logits in next_token_logits(gpt, ids, num_tokens):
            # what pads the vocabulary stands for no token
            token = sample_token(logits[: args.tokenizer_vocab_size], temperature, top_k, top_p, generator)
            if token == tokenizer.eod:
                break
            ids.append(token)
        return tokenizer.decode(ids)


def _check_sampling(num_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    for flag, value, fits, expected in (
        ("--num-tokens", num_tokens, num_tokens > 0, "at least 1"),
        ("--temperature", temperature, temperature >= 0, "at least 0"),
        ("--top-k", top_k, top_k >= 0, "at least 0"),
        ("--top-p", top_p, 0 <= top_p <= 1, "from 0 to 1"),
    ):
        if not fits:
            raise UsageError(f"{flag} {value}", expected, "Change it.")


@torch.no_grad()
def next_token_logits(gpt: torch.nn.Module, ids: list[int], number: int) -> Iterator[torch.Tensor]:
    """Yield, up to ``number`` times, the logits [vocabulary] of what follows ``ids``, fp32 on the host.

    The caller appends the token that it chooses to ``ids``; keys and values of the past are kept.
    """
    from megatron.core.inference.contexts import StaticInferenceContext

    device = devices.current().torch_device()
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=len(ids) + number)
    for _ in range(number):
        past = context.sequence_len_offset
        new = torch.tensor([ids[past:]], device=device)
        positions = torch.arange(past, len(ids), device=device)[None]
        logits = gpt(new, positions, None, inference_context=context, runtime_gather_output=True)
        context.increment_sequence_len_offset(new.size(1))
        yield logits[0, -1].float().cpu()


def sample_token(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Return a token drawn from the probabilities that logits mean; the likeliest if nothing is to be drawn.

    With both limits, ``top_p`` counts what ``top_k`` has left.

    Args:
        logits: [vocabulary], fp32 on the host.
        temperature: the logits are divided by it; 0: the likeliest token.
        top_k: draw among so many likeliest tokens; 0: all; 1: the likeliest token.
        top_p: draw among the fewest tokens whose probabilities sum to it, from 0 to 1; 0: all.
        generator: of the draw, on the host.
    """
    if temperature == 0 or top_k == 1:
        return int(logits.argmax())
    values, tokens = (logits / temperature).sort(descending=True, stable=True)
    if top_k:
        values, tokens = values[:top_k], tokens[:top_k]
    probabilities = values.softmax(0)
    if top_p:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
