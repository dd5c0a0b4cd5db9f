"""Continue prompts with the likeliest token each time, reading the whole text anew for every token.

No cache of keys and values: what ``test_text_generation`` compares the stock server with. Run by
``megatron-npu run``, with MEGATRON_LM_PATH set; the last line printed is a JSON list of texts.

Usage: greedy.py FLAGS... --prompt TEXT [--prompt TEXT...] --tokens-in-all N
"""

from __future__ import annotations

import argparse
import json

import torch
from megatron import get_args, get_tokenizer
from megatron.checkpointing import load_checkpoint
from megatron.initialize import initialize_megatron
from megatron.model import GPTModel
from megatron.training import get_model
from megatron.utils import get_ltor_masks_and_position_ids


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare the flags that Megatron does not have."""
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--tokens-in-all", type=int, required=True)
    return parser


@torch.no_grad()
def continued(model: torch.nn.Module, prompt: str) -> str:
    """Return the prompt and what follows it, ``--tokens-in-all`` tokens together."""
    tokenizer = get_tokenizer()
    ids = tokenizer.tokenize(prompt)
    while len(ids) < get_args().tokens_in_all:
        tokens = torch.tensor([ids], device="cuda")
        mask, _, positions = get_ltor_masks_and_position_ids(tokens, tokenizer.eod, False, False, False)
        logits = model(tokens, positions, mask)  # [1, s, vocabulary]
        ids.append(int(logits[0, -1, : tokenizer.vocab_size].argmax()))
    return tokenizer.detokenize(ids)


def main() -> None:
    defaults = {"tokenizer_type": "GPT2BPETokenizer", "no_load_rng": True, "no_load_optim": True}
    initialize_megatron(extra_args_provider=add_flags, args_defaults=defaults)
    (model,) = get_model(
        lambda pre_process, post_process: GPTModel(
            num_tokentypes=0, parallel_output=False, pre_process=pre_process, post_process=post_process
        ),
        wrap_with_ddp=False,
    )
    load_checkpoint([model], None, None)
    model.eval()
    print(json.dumps([continued(model, prompt) for prompt in get_args().prompt]))


if __name__ == "__main__":
    main()
