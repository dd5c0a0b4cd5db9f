"""Describe how a run differs from the checkpoint from which it resumes, and the effects of the differences.

All of them are listed in a single table, which is used by the log, docs/reference/resume.md and the tests.
Changes that are rejected are reported by the checks (``checkpoint_compatibility``) and listed only on the
page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_npu.base.errors import printable
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.flags.frozen_flags import Flags

_SCHEDULE = (
    "needs --override-opt_param-scheduler, which continues the new schedule from the run's current position"
)
_DATA = "samples are reshuffled, and the run continues in the new order at its current number of samples"
_IDS = "the trained weights are used with token ids that may have other meanings"
_AT_ONCE = "applies from the first update on"
_SAMPLES = (
    "the data is split into samples of another length, and the run continues at its current number of samples"
)


@dataclass(frozen=True)
class Flag:
    """A flag whose value may change when a run is resumed.

    Attributes:
        name: the name of its attribute.
        flag: its spelling on the command line.
        effect: what a changed value affects.
    """

    name: str
    flag: str
    effect: str


def _flags(effect: str, *names: str) -> list[Flag]:
    return [Flag(name, f"--{name.replace('_', '-')}", effect) for name in names]


FLAGS: tuple[Flag, ...] = (
    Flag("tokenizer_files", "tokenizer files", _IDS),
    Flag("tokenizer_type", "--tokenizer-type", _IDS),
    Flag("null_tokenizer_eod_id", "--null-tokenizer-eod-id", "documents end with a different token id"),
    *_flags(_DATA, "data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "seed"),
    *_flags(_SAMPLES, "seq_length"),
    *_flags(
        "each update uses a different number of samples; the schedule counts samples", "global_batch_size"
    ),
    *_flags("batch sizes follow the new ramp from the run's current number of samples", "rampup_batch_size"),
    *_flags("memory and speed change; results differ in their last digits", "micro_batch_size"),
    *_flags(_AT_ONCE, "attention_dropout", "hidden_dropout", "clip_grad"),
    *_flags(_AT_ONCE, "adam_beta1", "adam_beta2", "adam_eps", "muon_momentum"),
    *_flags(_SCHEDULE, "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_warmup_samples"),
    *_flags(_SCHEDULE, "lr_warmup_fraction", "lr_decay_iters", "lr_decay_samples"),
    *_flags(_SCHEDULE, "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *_flags(
        "changes the end of the run and, without --lr-decay-iters or --lr-decay-samples, also the "
        "learning-rate and weight-decay schedules; it therefore needs --override-opt_param-scheduler",
        "train_iters",
        "train_samples",
    ),
    *_flags(
        "applies at the next overflow, because an fp16 checkpoint contains its own loss scale",
        "initial_loss_scale",
    ),
    *_flags(
        "needs --no-load-optim or --finetune, because the optimizer keeps main weights only for 16-bit "
        "weights",
        "bf16",
        "fp16",
    ),
    *_flags("changes the loss from the first iteration on", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *_flags("changes the loss from the first iteration on", "mtp_loss_scaling_factor"),
    *_flags(
        "changes attention and losses across document boundaries",
        "reset_position_ids",
        "reset_attention_mask",
    ),
    *_flags("changes attention and losses across document boundaries", "eod_mask_loss"),
)
_OF_WEIGHTS = ("tokenizer_files", "tokenizer_type")  # what matters where the weights alone are taken over
_FOLLOWING = ("start_weight_decay", "end_weight_decay")  # of --weight-decay, where it does not change
_LONGEST = 100  # characters of a value that are shown


def since(found: CheckpointInfo, args: Flags) -> list[str]:
    """Return one log line for each difference from the checkpoint, or an empty list.

    Args:
        found: a checkpoint of the built-in trainer.
        args: the result of ``validation.check``, because the table names flags of every subject.
    """
    lines = [*_differences(found.arguments, args)]
    if args.no_load_optim and found.has_optimizer and not args.finetune:
        begins = (
            "" if _goes_on(args) else ", and the schedule starts again (see --override-opt_param-scheduler)"
        )
        lines.append(f"--no-load-optim: the optimizer's moments start at 0{begins}")
    if not lines:
        return []
    return [f" changed since the checkpoint {found.path}:", *(f"   {printable(line)}" for line in lines)]


def _goes_on(args: Flags) -> bool:
    return args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler


def _has_no_effect(name: str, args: Flags) -> bool:
    if args.finetune and name not in _OF_WEIGHTS:
        return True
    return name in _FOLLOWING and args.weight_decay_incr_style == "constant"


def _differences(saved: Mapping[str, Any], args: Flags) -> Iterator[str]:
    """Yield the flags whose values differ from those in the checkpoint.

    Flags that only one side has, as with older checkpoints, are ignored.
    """
    for row in FLAGS:
        if row.name not in saved or not hasattr(args, row.name) or _has_no_effect(row.name, args):
            continue
        before, now = saved[row.name], getattr(args, row.name)
        if before == now:
            continue
        if row.name == "tokenizer_files":
            before, now = _hashes(before), _hashes(now)
        effect = row.effect
        if effect is _SCHEDULE and args.use_checkpoint_opt_param_scheduler:
            effect = "no effect, because --use-checkpoint-opt_param-scheduler keeps the checkpoint's schedule"
        yield f"{row.flag} {_shown(now)} (checkpoint: {_shown(before)}): {effect}"


def _hashes(files: Mapping[str, str]) -> str:
    return ", ".join(f"{name} sha256 {digest[:12]}" for name, digest in sorted(files.items())) or "none"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
