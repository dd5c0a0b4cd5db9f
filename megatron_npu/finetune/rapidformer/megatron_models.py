"""Support Megatron models in ``PreTrainer``, with tensor and pipeline parallelism.

If a template's model is from megatron-core, the built-in trainer (``pretrain``) trains it with its process
groups, schedules, optimizer, checkpoints and log; the template provides data, model and loss.
``run_forward_step`` may be written for a single process: on a stage before the last, ``model(...)`` does not
return, and its output is sent to the next stage.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.rapidformer import providers, state
from megatron_npu.finetune.run.layout import ModelParallel
from megatron_npu.finetune.run.outcome import Outcome
from megatron_npu.pretrain.data import datasets as data
from megatron_npu.pretrain.data.epochs import RoundAndRound
from megatron_npu.pretrain.flags import arguments, derive, validation
from megatron_npu.pretrain.flags.checks import data as data_checks
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.model import gpt
from megatron_npu.pretrain.report import log as training_log
from megatron_npu.pretrain.run import initialize, pretrain
from megatron_npu.pretrain.run import loop as training_loop

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_npu.finetune.rapidformer.templates import PreTrainer

_MODEL = "num_layers hidden_size num_attention_heads seq_length max_position_embeddings".split()
_OF_FLAGS = (  # what of a template's configuration the flags decide
    "bf16 fp16 params_dtype pipeline_dtype deallocate_pipeline_outputs overlap_p2p_comm batch_p2p_comm "
    "gradient_accumulation_fusion recompute_granularity recompute_method recompute_num_layers "
    "calculate_per_token_loss"
).split()
_SCRIPTS = "megatron_npu.finetune.rapidformer.megatron_scripts"


def is_megatron(module: nn.Module) -> bool:
    """Return True if a model is a megatron-core model."""
    core = sys.modules.get("megatron.core.transformer.module")
    return core is not None and isinstance(module, core.MegatronModule)


def _names_megatron(template: PreTrainer) -> bool:
    """Return True if the file of a template defines or imports a megatron-core model."""
    core = sys.modules.get("megatron.core.transformer.module")
    for value in list(template.model_optimizer_lr_scheduler_provider.__globals__.values()):
        if getattr(value, "__module__", None) == _SCRIPTS and value.__name__.startswith("megatron_"):
            return True
        if core is not None and isinstance(value, type) and issubclass(value, core.MegatronModule):
            return True
    return False


@contextlib.contextmanager
def session(template: PreTrainer) -> Iterator[None]:
    """Create megatron-core's process groups inside the ``with`` block if the template may use a megatron-core
    model.

    A megatron-core model may be used if the flags select model parallelism or the template's file names such
    a model.

    Raises:
        UsageError: no supported megatron-core is installed, or the flags are inconsistent.
    """
    args = template.engine.args
    if not ModelParallel.of(args).is_cut and not _names_megatron(template):
        yield
        return
    missing = [name for name in _MODEL if getattr(args, name) is None]
    if missing:
        flag = f"--{missing[0].replace('_', '-')}"
        raise UsageError(
            f"{flag} is required to train a Megatron model, because the flags define the sizes of the "
            f"model. Add {flag}."
        )
    run = state.current()
    asked = driver_flags(args, calculate_per_token_loss=template.counts_labels())
    run.driver = validation.check(asked, data_check=_check_tokenizer)
    try:
        with initialize.session(run.driver):
            yield
    finally:
        run.driver = None


def driver_flags(args: Namespace, **others: object) -> Namespace:
    """Convert flags of ``train`` to flags of the built-in trainer, which have the same names.

    Args:
        args: the flags of ``train``, including its ranks.
        others: values of the trainer's flags that ``train`` has no flag for.
    """
    required = [word for name in _MODEL for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    batch = ["--micro-batch-size", str(args.micro_batch_size), "--train-iters", str(args.train_iters)]
    defaults = vars(arguments.parse([*required, *batch]))
    shared = defaults.keys() & vars(args).keys() - {"data_path", "epochs"}
    given = {name: getattr(args, name) for name in shared}
    reshardable = {"dist_ckpt_optim_fully_reshardable": True}  # a template's checkpoints go on in any layout
    return Namespace(**{**defaults, **given, **reshardable, **others})


def _check_tokenizer(args: Namespace) -> None:
    """Check the tokenizer of a run whose data comes from a template.

    The template provides the data itself.
    """
    data_checks.tokenizer(args)
    derive.data(args, there=True)


def train(
    template: PreTrainer, datasets: providers.Datasets, module: nn.Module, optimizer: Any, scheduler: Any
) -> Outcome:
    """Train the model of a template inside ``session``, and return the outcome.

    Args:
        template: the template, whose ``run_forward_step`` computes the loss.
        datasets: the template's data.
        module: this rank's pipeline stage of the template's megatron-core model.
        optimizer, scheduler: must be None, because megatron-core creates both from the flags.

    Raises:
        UsageError: the model is invalid, its configuration contradicts the flags, or it has an optimizer.
    """
    if not is_megatron(module):
        raise UsageError(
            f"{type(module).__name__} does not support --tensor-model-parallel-size or "
            "--pipeline-model-parallel-size; only megatron-core models support model parallelism. Return "
            "such a model (for example megatron_gpt()), or remove the flags."
        )
    if optimizer is not None or scheduler is not None:
        raise UsageError(
            "a custom optimizer or scheduler cannot be used with a Megatron model, because megatron-core "
            "creates its own from the flags. Return model, None, None."
        )
    args, config = flags(), module.config
    _complete(args, config)
    chunk = gpt.wrapped(args, config, module)
    journals: list[_Journal] = []

    def journal(*given: Any) -> training_log.Log:
        journals.append(_Journal(*given))
        return journals[0]

    parts = data.Datasets(datasets.train, datasets.valid, datasets.test)
    trainer = _trainer(template, datasets)
    outcome, _ = pretrain.train_chunks(RunPlan.of(args), config, [chunk], parts, trainer, journal)
    kept = journals[0]
    return Outcome(
        iteration=outcome.position.iteration,
        losses=kept.losses,
        grad_norms=kept.norms,
        checkpoint=outcome.checkpoint,
        ended_by=outcome.ended_by,
    )


def _complete(args: Flags, config: TransformerConfig) -> None:
    """Set the precision, recomputation and pipeline options in a template's configuration from the flags."""
    ours = gpt.transformer_config(args)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size"):
        own, asked = getattr(config, name), getattr(ours, name)
        if own != asked:
            raise UsageError(
                f"{name} is {own} in the model's configuration, but --{name.replace('_', '-')} is {asked}; "
                "the two must be equal. Build the model with megatron_config(), or change the flag."
            )
    for name in _OF_FLAGS:
        setattr(config, name, getattr(ours, name))


class _Journal(training_log.Log):
    """The built-in trainer's log, which also collects losses and gradient norms."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.losses: list[float] = []
        self.norms: list[float | None] = []

    def training(self, iteration: int, steps: training_log.Steps, **more: Any) -> None:
        """Collect the losses and gradient norms of an interval, and log them."""
        self.losses += steps.losses
        self.norms += steps.interval.norms
        super().training(iteration, steps, **more)


def _trainer(template: PreTrainer, datasets: providers.Datasets) -> type[training_loop.Trainer]:
    """Return the built-in trainer, set up with the data and the loss of a template."""

    class TemplateTrainer(training_loop.Trainer):
        """The built-in trainer with the data and the loss of a template."""

        goes_on = ""  # ``train`` has no flag for it

        def training_batches(self) -> data.Batches:
            """Return the micro-batches of the template's training data."""
            return self.batches(self.datasets.train, self.position.train_samples)

        def batches(self, dataset: Dataset | None, consumed: int) -> data.Batches:
            """Return micro-batches for every rank.

            A template requests them on each pipeline stage.
            """
            if dataset is None:
                return None
            order = RoundAndRound(len(dataset))  # type: ignore[arg-type]  # torch leaves __len__ to each
            return [data.micro_batches(self.plan.batches, dataset, consumed, order, datasets.collate_fn)]

        def forward_step(self, batches: Any, chunk: nn.Module) -> tuple[Tensor, Any]:
            """Run one micro-batch through this pipeline stage."""
            return _forward_step(template, batches, chunk)

    return TemplateTrainer


class _StageEnds(BaseException):
    """Raised by ``model(...)`` on every stage except the last, to leave ``run_forward_step``.

    This is a BaseException so that a user's ``except Exception`` does not catch it.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__("a pipeline stage before the last ends here")
        self.output = output


class _Stage:
    """Pipeline stage that ``run_forward_step`` can call like a model.

    Args:
        chunk: the stage in its wrappers, whose other attributes are accessible too.
        last: whether it is the last stage, whose output is returned to the caller.
    """

    def __init__(self, chunk: nn.Module, last: bool) -> None:
        self._chunk, self._last = chunk, last

    def __call__(self, *args: Any, **options: Any) -> Any:
        output = self._chunk(*args, **options)
        if not self._last:
            raise _StageEnds(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


def _forward_step(template: PreTrainer, batches: Any, chunk: nn.Module) -> tuple[Tensor, Any]:
    """Return the output for a micro-batch and its loss function, as megatron-core requires."""
    last = gpt.at_ends()[1]
    counts = _Counts(template, batches) if flags().calculate_per_token_loss else None
    batches = batches if counts is None else counts
    try:
        returned = template.run_forward_step(batches, _Stage(chunk, last))  # type: ignore[arg-type]
    except _StageEnds as end:
        return end.output, None
    if not last:
        raise UsageError(
            f"{type(template).__name__}.run_forward_step did not call model(...) on a pipeline stage, but "
            "the next stage requires the model's output. Call the model, or pass "
            "--pipeline-model-parallel-size 1."
        )
    loss = providers.loss(template, returned, training=torch.is_grad_enabled())
    return loss, _mean_of_ranks if counts is None else counts.weighed


class _Counts:
    """Iterator over batches that also counts the labels over which the loss is averaged.

    Args:
        template: the template, whose ``label_counts`` returns the number of labels in a batch.
        batches: the batches of this stage.
    """

    def __init__(self, template: PreTrainer, batches: Iterator[Any]) -> None:
        self._template, self._batches, self._labels = template, batches, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        labels = self._template.label_counts(batch)
        if isinstance(labels, tuple):
            raise UsageError(
                f"{type(self._template).__name__}.label_counts must return one number, because Megatron "
                f"models have a single loss, but it returned {len(labels)}. Return one number."
            )
        self._labels += labels
        return batch

    def weighed(self, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss summed over the labels, the number of labels (int32), and both values for the log,
        ``[2]`` fp32.

        megatron-core divides the gradients by the label count of all micro-batches and ranks.
        """
        labels = torch.tensor(self._labels, dtype=torch.int, device=loss.device)
        whole = loss * self._labels
        return whole, labels, torch.stack([whole.detach().float(), labels.float()])


def _mean_of_ranks(loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and ``[loss, 1]``, which megatron-core averages over micro-batches and ranks."""
    log = torch.stack([loss.detach().float(), torch.ones_like(loss, dtype=torch.float32)])
    return loss.clone(), log  # of its own: megatron-core divides it in place, and frees it behind a stage


def flags() -> Flags:
    """Return the built-in trainer's flags for the current run of this process.

    Raises:
        UsageError: there is no run.
    """
    run = state.run()
    if run is None or run.driver is None:
        raise UsageError(
            "a Megatron model was created outside a template's train(), or without the flags that define "
            "its sizes. Create the model in the model_optimizer_lr_scheduler_provider of a PreTrainer, pass "
            "--num-layers and the other size flags, and import the model's class at the top of the script."
        )
    return run.driver
