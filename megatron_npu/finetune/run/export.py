"""Export the trained model to a folder for ``from_pretrained``, with its tokenizer and a model card.

A model that is not from Transformers is written as ``model.safetensors`` with the card.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_npu import devices, watchdog
from megatron_npu.base import files
from megatron_npu.finetune.model.prepare import Prepared
from megatron_npu.finetune.run import model_card
from megatron_npu.finetune.run.flag_parts import SaveFlags
from megatron_npu.process import deepspeed_device

if TYPE_CHECKING:
    from megatron_npu.finetune.run.outcome import Outcome

FOLDER = "model"  # in --save


@watchdog.phase(watchdog.SAVING)
def write(flags: SaveFlags, prepared: Prepared, outcome: Outcome, tokenizer: Any = None) -> Path:
    """Write the model to the folder ``model`` in ``--save``, and return the folder.

    All ranks must call this function.

    Args:
        flags: the flags that say where and as what the run is saved.
        prepared: the prepared model, whose shards are gathered on rank 0.
        outcome: the outcome of the training, for the card.
        tokenizer: the tokenizer to include. If None, the tokenizer of ``--pretrained-model-name-or-path`` is
            included, if there is one.
    """
    place = Path(flags.save) / FOLDER
    weights = prepared.full_weights()
    if flags.rank == 0:
        with files.new_folder(place, replace=True) as part:
            _save(prepared.module, weights, part)
            tokenizer = tokenizer or _tokenizer(flags.pretrained_model_name_or_path)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(part)
            model_card.write(part, flags, prepared, outcome)
    dist.barrier()
    return place


def _save(module: Any, weights: dict[str, Any], part: Path) -> None:
    if hasattr(module, "save_pretrained"):
        if deepspeed_device.installed():  # accelerate imports it, and unasked it warns of a CPU
            deepspeed_device.choose(devices.current().name)
        # peft would ask the hub whether the vocabulary has grown; no adapter changes it
        options = {"save_embedding_layers": False} if hasattr(module, "peft_config") else {}
        module.save_pretrained(part, state_dict=weights, **options)
        return
    from safetensors.torch import save_file

    own = {name: value.contiguous() for name, value in weights.items() if hasattr(value, "contiguous")}
    shared = _first_of_each(own)
    save_file({name: own[name] for name in shared}, part / "model.safetensors", metadata={"format": "pt"})


def _first_of_each(weights: dict[str, Any]) -> list[str]:
    """Return the names of the weights, with only one name for weights that share memory."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, value in weights.items():
        key = (value.data_ptr(), tuple(value.shape)) if value.numel() else (id(value), ())
        seen.setdefault(key, name)
    return list(seen.values())


def _tokenizer(name: str | None) -> Any:
    """Return the tokenizer of the initial model, or None if there is none."""
    if name is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError):  # what Transformers raises for a folder without one
        return None
