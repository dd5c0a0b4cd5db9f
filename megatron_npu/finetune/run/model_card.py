"""Write the model card ``README.md`` of a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from megatron_npu.base import files
from megatron_npu.finetune import tasks
from megatron_npu.finetune.model.prepare import FUSED_OPS, Prepared
from megatron_npu.finetune.run.flag_parts import SaveFlags
from megatron_npu.finetune.tasks.declaration import Declaration

if TYPE_CHECKING:
    from megatron_npu.finetune.run.outcome import Outcome

NAME = "README.md"
_FLAGS = """
    task epochs train_iters micro_batch_size global_batch_size lr min_lr lr_decay_style lr_warmup_iters
    lr_warmup_fraction weight_decay clip_grad adam_beta1 adam_beta2 seed seq_length mixed_precision sharding
    lora_rank world_size
""".split()


def write(folder: Path, flags: SaveFlags, prepared: Prepared, outcome: Outcome) -> None:
    """Write the model card of a trained model.

    Args:
        folder: folder of the model.
        flags: flags of its training run.
        prepared: the model.
        outcome: outcome of the training run.
    """
    of_transformers = hasattr(prepared.module, "save_pretrained")
    task = tasks.every().get(flags.task or "") if of_transformers else None
    origin = _origin(flags.pretrained_model_name_or_path)
    kind, pipeline = _kind(prepared.module), _pipeline(task)
    head = [f"pipeline_tag: {pipeline}"] if pipeline else []
    if of_transformers:
        head.append("library_name: transformers")
    lines = [
        *(["---", *head, "---", ""] if head else []),
        *(f"# {kind}", ""),
        f"Trained for {outcome.iteration} iterations by `megatron-npu train`{origin}.",
        *("", "## Training", "", *_training(flags, prepared)),
        *("", "## Results", "", *_results(outcome)),
    ]
    if task is not None and task.head is not None:
        lines += ["", "## Use", "", "```python", *_use(task.head, pipeline), "```"]
    files.write(folder / NAME, "\n".join(lines) + "\n")


def _pipeline(task: type[Declaration] | None) -> str | None:
    """Return the Transformers pipeline for a model of the given task, if the installed Transformers provides
    it.

    Transformers 5 has removed some pipelines, such as ``question-answering``.
    """
    if task is None or task.pipeline is None:
        return None
    from transformers.pipelines import PIPELINE_REGISTRY

    return task.pipeline if task.pipeline in PIPELINE_REGISTRY.get_supported_tasks() else None


def _use(head: str, pipeline: str | None) -> list[str]:
    """Return the lines of Python code that load the model from its folder."""
    if pipeline is not None:
        return ["from transformers import pipeline", "", f'run = pipeline("{pipeline}", ".")']
    return [
        f"from transformers import {head}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        f'model = {head}.from_pretrained(".")',
    ]


def _kind(module: Any) -> str:
    """Return the name of the model's class, without the ``FSDP…`` subclass that ``fully_shard`` creates."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _origin(name: str | None) -> str:
    """Return a phrase that names the initial model.

    For a folder, it contains the name but not the path.
    """
    if name is None:
        return ""
    return f", from `{Path(name).name if Path(name).is_dir() else name}`"


def _training(flags: SaveFlags, prepared: Prepared) -> Iterator[str]:
    yield from ("| flag | value |", "|---|---|")
    for name in _FLAGS:
        value = getattr(flags.all_flags, name)
        if value is not None and value is not False and value != "none":  # 0 is a value, and equals False
            yield f"| `{name}` | {value} |"
    yield ""
    paths = flags.data_path if isinstance(flags.data_path, list) else [flags.data_path]
    names = ", ".join(f"`{Path(path).name}`" for path in paths if path)
    yield f"- data: {names or 'not named'}{f', {flags.data_name}' if flags.data_name else ''}"
    yield from _as_prepared(prepared)


def _as_prepared(prepared: Prepared) -> Iterator[str]:
    """Yield lines that describe how the model was changed.

    Fused operations are combined into one line.
    """
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
