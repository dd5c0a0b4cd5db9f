"""One rank that draws texts from a checkpoint in several layouts, one after another.

Usage: sampler_worker.py CHECKPOINT OUTPUT LAYOUTS, where LAYOUTS is JSON: name -> changes to the flags. Each
rank writes OUTPUT.RANK: name -> texts, and the log probabilities of the prompts where a layout can tell them.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

from megatron_npu import plugin
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sample, Sampler
from megatron_npu.pretrain.checkpoint import checkpoint_files, checkpoints, stock_checkpoints
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.flags import derive
from megatron_npu.pretrain.flags.plan_parts import TokenizerFlags
from megatron_npu.pretrain.model import gpt
from megatron_npu.pretrain.run import initialize, layout

PROMPTS = [[1, 2, 3], [7], [9, 12, 15, 18, 21, 24], [1, 2, 3]]


def wants_no_more(place: int, sample: Sample) -> bool:
    """End the third text early, on the first rank alone: the others have to hear of it."""
    return place == 2 and len(sample.tokens) == 4 and os.environ.get("RANK", "0") == "0"


def flags_of(folder: str, changes: dict[str, object]) -> Namespace:
    """Return the flags of a checkpoint, in another layout."""
    found = stock_checkpoints.find(folder)
    assert found is not None
    args = Namespace(**{**found.arguments, **layout.ALONE, **changes})
    derive.process(args)
    derive.padded_vocab_size(args)
    return args


def texts(args: Namespace, path: Path) -> dict[str, list | None]:
    """Return what a model in one layout draws in each of the ways, and what it thinks of the prompts."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # of the layout before
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    chunks = gpt.build(args, gpt.transformer_config(args))
    checkpoints.load_weights(chunks, path)
    sampler = Sampler(chunks, tokenizers.build(TokenizerFlags.of(args)), args.tokenizer_vocab_size)
    ways = [
        (Options(num_tokens=12, seed=5, top_p=0.9), None),
        (Options(num_tokens=12, temperature=0, alternatives=1), wants_no_more),
        (Options(num_tokens=6, seed=5, top_k=9, recompute=True), None),
    ]
    drawn = [sampler.sample(PROMPTS, options, watch, batch=3) for options, watch in ways]
    assert all(chunk.training for chunk in chunks)
    for place, sample in enumerate(drawn[1]):  # the end token has one, too; the third text has none
        assert len(sample.logprobs) == len(sample.tokens) + (sample.finished and place != 2)
    is_cut = args.sequence_parallel or args.context_parallel_size > 1
    scores = None if is_cut else sampler.score(PROMPTS, alternatives=2, batch=2)
    return {
        "texts": [[sample.ids(), sample.finished] for samples in drawn for sample in samples],
        "scores": scores and [[score.logprobs, score.greedy] for score in scores],
    }


def main() -> None:
    folder, output, layouts = sys.argv[1:]
    plugin.install()
    flags = {name: flags_of(folder, changes) for name, changes in json.loads(layouts).items()}
    path = checkpoint_files.newest(folder)
    with initialize.session(next(iter(flags.values()))):
        found = {name: texts(args, path) for name, args in flags.items()}
    Path(f"{output}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
