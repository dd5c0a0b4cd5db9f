"""The model card of a trained model: ``README.md`` of its folder."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from megatron_npu import files
from megatron_npu.acceleration.prepare import FUSED_OPS, Prepared

if TYPE_CHECKING:
    from megatron_npu.acceleration.outcome import Outcome

NAME = "README.md"
_PIPELINES = {
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "question_answering": "question-answering",
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "seq2seq": "text2text-generation",
}
_FLAGS = """
    task epochs train_iters micro_batch_size global_batch_size lr min_lr lr_decay_style lr_warmup_iters
    lr_warmup_fraction weight_decay clip_grad adam_beta1 adam_beta2 seed seq_length mixed_precision sharding
    lora_rank world_size
""".split()


def write(folder: Path, args: Namespace, prepared: Prepared, outcome: Outcome) -> None:
    """Write the card.

    Args:
        folder: of the model.
        args: the flags of its training.
        prepared: the model.
        outcome: of the training.
    """
    kind, pipeline = _kind(prepared.module), _PIPELINES.get(args.task or "")
    head = [f"pipeline_tag: {pipeline}"] if pipeline else []
    if hasattr(prepared.module, "save_pretrained"):
        head.append("library_name: transformers")
    lines = [
        *(["---", *head, "---", ""] if head else []),
        *(f"# {kind}", ""),
        f"Trained for {outcome.iteration} iterations by `megatron-npu train`{_origin(args)}.",
        *("", "## Training", "", *_training(args, prepared)),
        *("", "## Results", "", *_results(outcome)),
    ]
    if pipeline:
        use = f'pipeline("{pipeline}", ".")'
        lines += ["", "## Use", "", "```python", "from transformers import pipeline", use, "```"]
    files.write(folder / NAME, "\n".join(lines) + "\n")


def _kind(module: Any) -> str:
    """Return the name of the model's class; ``fully_shard`` makes one of its own of it, ``FSDP…``."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _origin(args: Namespace) -> str:
    """Return what it began with; of a folder its name, not where it was on the machine."""
    name = args.pretrained_model_name_or_path
    if name is None:
        return ""
    return f", from `{Path(name).name if Path(name).is_dir() else name}`"


def _training(args: Namespace, prepared: Prepared) -> Iterator[str]:
    yield from ("| flag | value |", "|---|---|")
    for name in _FLAGS:
        value = getattr(args, name)
        if value is not None and value is not False and value != "none":  # 0 is a value, and equals False
            yield f"| `{name}` | {value} |"
    yield ""
    paths = args.data_path if isinstance(args.data_path, list) else [args.data_path]
    names = ", ".join(f"`{Path(path).name}`" for path in paths if path)
    yield f"- data: {names or 'not named'}{f', {args.data_name}' if args.data_name else ''}"
    fused = [line for line in prepared.ledger if line.startswith(FUSED_OPS)]
    operations = {line.rpartition(": ")[2].partition(",")[0] for line in fused if " stays: " not in line}
    if operations:
        yield f"- {FUSED_OPS}{', '.join(sorted(operations))}"
    for line in prepared.ledger:
        if line not in fused:
            yield f"- {line}"


def _results(outcome: Outcome) -> Iterator[str]:
    if outcome.losses:
        yield f"- training loss of the last iteration: {outcome.losses[-1]:.4f}"
    last = outcome.evaluations[max(outcome.evaluations)] if outcome.evaluations else None
    for part, found in (("validation", last), ("test", outcome.test)):
        if found is not None:
            for name, value in {"loss": found.loss, **found.metrics}.items():
                yield f"- {name} on the {part} data: {value:.4f}"
