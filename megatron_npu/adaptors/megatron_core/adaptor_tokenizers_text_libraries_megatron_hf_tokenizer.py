"""``megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer``: GPT-2's and BERT's tokenizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap
from megatron_npu.errors import UsageError


@wrap(
    "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer:MegatronHFTokenizer.__init__",
    versions=">=0.15",
    why="it asks the hub of Hugging Face for them, whatever files are given; a machine without a network "
    "gets two tracebacks that do not tell what to do",
)
def name_the_flag(original: Callable[..., None]) -> Callable[..., None]:
    """Say which flag reads the files, where the hub cannot be reached."""

    @functools.wraps(original)
    def __init__(self: Any, tokenizer_path: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            original(self, tokenizer_path, *args, **kwargs)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"--tokenizer-type {tokenizer_path}: {reason}",
                "Hugging Face's files of it on this machine, or a network to fetch them",
                "Add --legacy-tokenizer: then --vocab-file and --merge-file are read.",
            ) from error

    return __init__
