"""Write the model card ``README.md`` for a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.pretrain.checkpoint import stock_checkpoints
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.checkpoint.checkpoint_files import RELEASE
from megatron_npu.pretrain.flags.frozen_flags import Flags

NAME = "README.md"
_MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length
    max_position_embeddings position_embedding_type normalization swiglu untie_embeddings_and_output_weights
    padded_vocab_size
""".split()
_EXPERTS = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_TRAINING = """
    micro_batch_size global_batch_size train_iters train_samples lr min_lr lr_decay_style lr_warmup_iters
    weight_decay clip_grad adam_beta1 adam_beta2 attention_dropout hidden_dropout seed bf16 fp16
    tensor_model_parallel_size pipeline_model_parallel_size
""".split()
_TRAINING_OF_EXPERTS = ("expert_model_parallel_size", "moe_aux_loss_coeff")
_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_LOSSES = {
    "loss_first": "training loss of the first iteration",
    "loss_last": "training loss of the last iteration",
    "validation_loss": "validation loss",
    "validation_perplexity": "validation perplexity",
}


def write(folder: Path, found: CheckpointInfo, args: Flags, values: Mapping[str, Any], dtype: str) -> None:
    """Write the model card of a converted model.

    Args:
        folder: the Hugging Face folder.
        found: the converted checkpoint.
        args: the checkpoint's flags.
        values: the keys of ``config.json``.
        dtype: Megatron's name for the dtype of the weights.
    """
    names = [*_MODEL, *(_EXPERTS if getattr(args, "num_experts", None) else ())]
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""),
        *(f"# {values['architectures'][0]} from Megatron", ""),
        f"{_origin(found)} The weights are {dtype}.",
        *("", "## Model", "", *_table({name: getattr(args, name, None) for name in names})),
        *("", "## Training", "", *_training(found, args)),
        *("", "## Use", "", *_use(args)),
    ]
    files.write(folder / NAME, "\n".join(lines) + "\n")


def _origin(found: CheckpointInfo) -> str:
    if found.path.name == RELEASE:
        return "Converted from a checkpoint without further training in Megatron."
    return f"Trained with Megatron for {found.iteration} iterations."


def _table(values: Mapping[str, Any]) -> list[str]:
    """Return a table of the flags that are set, leaving out switches that are off."""
    rows = [
        f"| `--{name.replace('_', '-')}` | {'on' if value is True else value} |"
        for name, value in values.items()
        if value is not None and value is not False
    ]
    return ["| flag | value |", "|---|---|", *rows]


def _training(found: CheckpointInfo, args: Flags) -> Iterator[str]:
    flags = found.arguments if found.is_own else stock_checkpoints.flags_of(found.path)
    if found.path.name == RELEASE or flags.get("lr") is None:
        yield "The checkpoint does not record how it was trained."
        return
    names = [*_TRAINING, *(_TRAINING_OF_EXPERTS if getattr(args, "num_experts", None) else ())]
    yield from _table({name: flags.get(name) for name in names})
    yield ""
    yield f"- data: {', '.join(_data(flags)) or 'not named'}"
    if samples := found.consumed_train_samples or flags.get("consumed_train_samples"):
        yield f"- samples: {samples} of {args.seq_length} tokens"
    for name, value in _losses(found).items():
        yield f"- {_LOSSES[name]}: {value:.4f}"


def _data(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the datasets without their folders."""
    words = [str(word) for name in _DATA for word in arguments.get(name) or []]
    return [f"`{Path(word).name}`" for word in words if not word.replace(".", "", 1).isdigit()]


def _losses(found: CheckpointInfo) -> dict[str, float]:
    """Return the losses in the run's summary, or an empty dict if the summary is for another checkpoint."""
    try:
        summary = json.loads(files.text(found.path.parent / "summary.json"))
        same = summary["iterations"] == found.iteration
        return {name: float(summary[name]) for name in _LOSSES if same and summary[name] is not None}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # there is none, or it is of another program
        return {}


def _use(args: Flags) -> Iterator[str]:
    yield "```python"
    if args.tokenizer_type == "NullTokenizer":
        yield ("from transformers import AutoModelForCausalLM  # no tokenizer: texts are token ids")
        yield 'model = AutoModelForCausalLM.from_pretrained(".")'
    else:
        yield "from transformers import pipeline"
        yield 'pipeline("text-generation", ".")("To be", max_new_tokens=40)'
    yield from ("```", "", "To convert it back to Megatron and continue training:", "", "```bash")
    yield "megatron-npu convert --from hf --to megatron . checkpoints/model"
    yield (
        "megatron-npu pretrain $(cat checkpoints/model/flags.txt) --load checkpoints/model "
        "--save checkpoints/tuned --micro-batch-size 4 --train-iters 1000 --lr 1e-5 "
        "--data-path data/text_document"
    )
    yield "```"
