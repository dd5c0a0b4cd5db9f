"""Write the logits of a model of 285068c8 on numbers that count up. Run by ``megatron-npu run``.

Usage: logits.py FLAGS... --load DIR --logits FILE, with MEGATRON_LM_PATH set.
"""

from __future__ import annotations

import argparse

import torch
from megatron import get_args
from megatron.checkpointing import load_checkpoint
from megatron.initialize import initialize_megatron
from megatron.model import GPTModel
from megatron.training import get_model


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare the flag that Megatron does not have."""
    parser.add_argument("--logits", required=True)
    return parser


@torch.no_grad()
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
    tokens = torch.arange(get_args().seq_length, device="cuda")[None]
    mask = torch.ones(1, 1, tokens.size(1), tokens.size(1), device="cuda").triu(1).bool()
    logits = model.eval()(tokens, tokens, mask)  # [1, s, vocabulary]
    if torch.distributed.get_rank() == 0:
        torch.save(logits.float().cpu(), get_args().logits)


if __name__ == "__main__":
    main()
