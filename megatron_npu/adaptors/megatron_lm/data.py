"""``megatron.data``: dataset index files, built without a compiler, read without pickle; iterators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around, records
from megatron_npu.adaptors.shared import data, questions

data.connect(
    records,
    ("gpt_dataset", "dataset_utils", "biencoder_dataset_utils", "realm_dataset_utils"),
    until="285068c8 is frozen: for ever (0.16 still passes allow_pickle=True)",
)
questions.connect(records, "tasks.orqa.unsupervised.nq", until="285068c8 is frozen: for ever")


@around(
    "megatron.training:build_train_valid_test_data_iterators",
    why="a run that has ended and is started again, as after a kill in its last save, validates on samples "
    "behind those of its last validation, and ends in StopIteration when there are none",
)
def validate_again_at_the_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let a finished run that is started again validate on the samples of its last validation."""
    from megatron.global_vars import get_args

    given = get_args()
    if given.train_samples is None and given.iteration >= given.train_iters > 0 and given.eval_interval:
        before = given.iteration // given.eval_interval * given.eval_iters * given.global_batch_size
        given.consumed_valid_samples = min(given.consumed_valid_samples, before)
    return original(*args, **kwargs)
