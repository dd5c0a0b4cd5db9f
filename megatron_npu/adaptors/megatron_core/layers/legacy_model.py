"""Replace the GPT model that ``tasks/main.py`` builds from ``megatron.legacy.model`` (before 0.13)."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap


@wrap(
    "megatron.legacy.model:GPTModel",
    versions="<0.13",
    why=(
        "tasks/main.py (LAMBADA, WIKITEXT103) always builds this legacy model, so that no checkpoint of "
        "pretrain_gpt.py, whose models are megatron-core's, can be loaded"
    ),
    upstream_bug=True,
    until="0.13, which has no such tasks",
)
def model_of_the_flags(original: type) -> type:
    """Build the model that ``pretrain_gpt.py`` builds, unless ``--use-legacy-models`` is given."""

    class GPTModel(original):
        """Select the GPT model: upstream's legacy model, or that of megatron-core."""

        def __new__(
            cls,
            config: Any,
            num_tokentypes: int = 0,
            parallel_output: bool = True,
            pre_process: bool = True,
            post_process: bool = True,
        ) -> Any:
            from megatron.training import get_args

            if get_args().use_legacy_models:
                return super().__new__(cls)
            return _core_model(parallel_output, pre_process, post_process)

    return GPTModel


def _core_model(parallel_output: bool, pre_process: bool, post_process: bool) -> Any:
    """Build the model that ``pretrain_gpt.py`` builds.

    Its logits are ``[b, s, v]``, as in the legacy model.

    Args:
        parallel_output: whether each tensor-parallel rank keeps its part of the vocabulary.
    """
    model = importlib.import_module("pretrain_gpt").model_provider(pre_process, post_process)
    if post_process:
        model.output_layer.gather_output = not parallel_output
    return model
