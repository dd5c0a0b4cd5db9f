"""Patch ``megatron.data`` for index files that need neither a compiler nor pickle, and for iterators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around, records
from megatron_npu.adaptors.shared import data, questions

data.connect(
    records,
    ("gpt_dataset", "dataset_utils", "biencoder_dataset_utils", "realm_dataset_utils"),
    until="never: 285068c8 is frozen (0.16 still passes allow_pickle=True)",
)
questions.connect(records, "tasks.orqa.unsupervised.nq", until="never: 285068c8 is frozen")


@around(
    "megatron.training:build_train_valid_test_data_iterators",
    why="a finished run that is started again, as after being killed during its last save, validates on the "
    "samples after those of its last validation, and raises StopIteration if there are none",
)
def validate_again_at_the_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Validate a finished run that is started again on the samples of its last validation."""
    from megatron.global_vars import get_args

    given = get_args()
    if given.train_samples is None and given.iteration >= given.train_iters > 0 and given.eval_interval:
        before = given.iteration // given.eval_interval * given.eval_iters * given.global_batch_size
        given.consumed_valid_samples = min(given.consumed_valid_samples, before)
    return original(*args, **kwargs)
