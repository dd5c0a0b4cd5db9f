"""Stock ``pretrain_gpt.py`` on packed samples that are made here: hybrid_batches_worker.py FLAGS.

With ``--hybrid-context-parallel`` upstream's scheduler deals the sub-samples of a batch out to the ranks;
without it each sub-sample is a micro-batch of its own, on one process. The losses of both are the same.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys

import torch

import megatron_npu

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])
megatron_npu.install()

import pretrain_gpt  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import pretrain  # noqa: E402

LENGTH = 128
# Ends of the sub-samples, in turns; a rank takes 32 tokens, so that they need 4, 1 and 2 ranks.
ENDS = ((128,), (32, 64, 96, 128), (64, 128), (16, 32, 48, 112, 128))


class Packed(torch.utils.data.Dataset):
    """Samples of counting tokens; a sub-sample starts anew, and its last token is not learned."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ends = torch.tensor((0, *ENDS[index % len(ENDS)]), dtype=torch.int32)
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 250, (LENGTH + 1,), generator=generator)
        positions = torch.arange(LENGTH)
        starts = ends[torch.bucketize(positions, ends, right=True) - 1]
        mask = torch.ones(LENGTH)
        mask[ends[1:].long() - 1] = 0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": mask,
            "position_ids": positions - starts,
            "cu_seqlens": ends,
            "max_seqlen": (ends[1:] - ends[:-1]).max(),
        }


class Apart(torch.utils.data.Dataset):
    """The sub-samples of ``Packed``, one by one."""

    def __init__(self) -> None:
        self.places = [(i, a, b) for i in range(64) for a, b in itertools.pairwise((0, *ENDS[i % len(ENDS)]))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample, start, end = self.places[index]
        names = ("tokens", "labels", "loss_mask", "position_ids")
        return {name: value[start:end] for name, value in Packed()[sample].items() if name in names}


def datasets(numbers, vp_stage=None):
    """Return the data for training alone."""
    return Packed() if HYBRID else Apart(), None, None


datasets.is_distributed = True


def count_groups():
    """Let each sub-sample's number of ranks be printed."""
    from megatron.core.datasets import data_schedule

    def watched(self):
        samples, groups = original(self)
        if torch.distributed.get_rank() == 0:
            counts: dict[int, int] = {}
            for group in groups:
                for ranks in group:
                    for sample in ranks:
                        counts[sample] = counts.get(sample, 0) + 1
            print(f"ranks of sub-samples: {sorted(counts.values())}", flush=True)
        return samples, groups

    original = data_schedule.HybridCPDataLoaderWrapper.__next__
    data_schedule.HybridCPDataLoaderWrapper.__next__ = watched


HYBRID = "--hybrid-context-parallel" in sys.argv
FLAGS = [
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention".split(),
    *f"--num-query-groups 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH} --lr 1e-2".split(),
    *"--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0".split(),
    *"--no-gradient-accumulation-fusion --calculate-per-token-loss --micro-batch-size 1".split(),
    *f"--global-batch-size {len(ENDS) if HYBRID else sum(map(len, ENDS))} --train-iters 3".split(),
    *"--log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0 --dataloader-type single".split(),
    *"--tokenizer-type NullTokenizer --vocab-size 255 --no-create-attention-mask-in-dataloader".split(),
    *"--split 100,0,0 --data-path none --rerun-mode disabled --distributed-timeout-minutes 3".split(),
]


def main() -> None:
    if HYBRID:
        count_groups()
    sys.argv += FLAGS
    model = functools.partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder)
    kind, step = ModelType.encoder_or_decoder, pretrain_gpt.forward_step
    if not hasattr(pretrain_gpt, "parse_and_validate_args"):  # before 0.18
        pretrain(datasets, model, kind, step)
        return
    args = pretrain_gpt.parse_and_validate_args()
    make = pretrain_gpt.pretrain_cfg_container_from_args
    if not hasattr(pretrain_gpt, "gpt_config_from_args"):  # 0.18
        pretrain(make(args), datasets, model, kind, step)
        return
    pretrain(make(args, pretrain_gpt.gpt_config_from_args(args)), datasets, kind, step)


if __name__ == "__main__":
    main()
