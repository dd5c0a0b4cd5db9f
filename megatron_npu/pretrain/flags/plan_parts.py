"""Define the parts of a run's plan, each of which contains the flags of one subject.

Each part is a frozen class for one subject, with typed fields named like the flags.

Each part of the built-in trainer takes only the classes that it needs. ``of`` fills a class from resolved
flags, which ``validation.check`` returned or a checkpoint has stored.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.derive import expert_layers

_Part = TypeVar("_Part", bound="Part")


@dataclass(frozen=True)
class Part:
    """Base class for the flags of one subject, whose fields have the names of the flags."""

    @classmethod
    def of(cls: type[_Part], args: Namespace) -> _Part:
        """Create this part of the plan from resolved flags.

        Raises:
            AttributeError: a flag is missing.
        """
        derived = cls._derived(args)
        names = [field.name for field in fields(cls) if field.name not in derived]
        return cls(**{name: getattr(args, name) for name in names}, **derived)

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        """Return the values of fields that are not copied from the flag with the same name."""
        return {}


@dataclass(frozen=True)
class WandbFlags(Part):
    """Flags that determine where a run is logged in Weights & Biases.

    ``place`` is the local folder; ``config`` contains all flags, which the web site displays.
    """

    wandb_project: str
    wandb_exp_name: str
    wandb_entity: str
    place: str
    config: Namespace

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"config": args, "place": args.wandb_save_dir or str(Path(args.save) / "wandb")}


@dataclass(frozen=True)
class SinkFlags(Part):
    """Flags that determine where a run's reports are written.

    ``wandb`` is None without --wandb-project.
    """

    rank: int
    train_iters: int
    save: str | None = None
    tensorboard_dir: str | None = None
    json_log: str | None = None
    plot: bool = False
    wandb: WandbFlags | None = None

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        asked = getattr(args, "wandb_project", None)  # ``train`` has no such flag
        return {"wandb": WandbFlags.of(args) if asked else None}


@dataclass(frozen=True)
class ModelSizes(Part):
    """Sizes of the model from which the number of FLOPs is computed.

    ``expert_layers`` contains for each layer whether it has experts.
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    swiglu: bool
    seq_length: int
    global_batch_size: int
    padded_vocab_size: int
    expert_layers: Sequence[bool]
    multi_latent_attention: bool = False
    kv_channels: int = 0
    num_query_groups: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    mtp_num_layers: int | None = None
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"expert_layers": tuple(expert_layers(args))}


@dataclass(frozen=True)
class LogFlags(SinkFlags):
    """Flags whose values appear in log lines.

    ``ramps`` is True if the global batch size ramps up.
    """

    world_size: int = 1
    global_batch_size: int = 1
    seq_length: int = 1
    epochs: int | None = None
    epoch_samples: int | None = None
    ramps: bool = False
    moe_per_layer_logging: bool = False
    sizes: ModelSizes | None = None

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {
            **super()._derived(args),
            "ramps": bool(args.rampup_batch_size),
            "sizes": ModelSizes.of(args),
        }


@dataclass(frozen=True)
class TokenizerFlags(Part):
    """Flags that specify the tokenizer and its files.

    ``null_tokenizer_eod_id`` is None in ``train``, which does not have the flag.
    """

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    null_tokenizer_eod_id: int | None = None

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"null_tokenizer_eod_id": getattr(args, "null_tokenizer_eod_id", None)}


@dataclass(frozen=True)
class SourceFlags(Part):
    """The sources of each split's samples, and the number of tokens per sample."""

    data_path: list[str] | None
    train_data_path: list[str] | None
    valid_data_path: list[str] | None
    test_data_path: list[str] | None
    split: str
    seq_length: int

    def of_part(self, part: str) -> list[str] | None:
        """Return the value of ``--train-data-path``, or of the corresponding flag for another split."""
        paths = {"train": self.train_data_path, "valid": self.valid_data_path, "test": self.test_data_path}
        return paths[part]


@dataclass(frozen=True)
class DatasetFlags(SourceFlags):
    """Flags that determine the datasets that a run reads, and the number of samples of each."""

    rank: int
    seed: int
    mock_data: bool
    multiple_validation_sets: bool
    full_validation: bool
    eval_iters: int
    eval_interval: int | None
    train_iters: int
    train_samples: int | None
    epoch_samples: int | None
    global_batch_size: int
    data_cache_path: str | None
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    tokenizer: TokenizerFlags

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"tokenizer": TokenizerFlags.of(args)}


@dataclass(frozen=True)
class BatchFlags(Part):
    """Flags that determine how micro-batches are read.

    ``epoch_samples`` is the number of samples per epoch, or None without --epochs.
    """

    micro_batch_size: int
    num_workers: int
    virtual_pipeline_model_parallel_size: int | None
    epoch_samples: int | None
    seed: int


@dataclass(frozen=True)
class SampleFlags(Part):
    """Flags for generating sample texts during training."""

    sample_prompt: list[str]
    sample_tokens: int
    sample_temperature: float
    seed: int
    tokenizer_vocab_size: int
    tokenizer: TokenizerFlags

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"tokenizer": TokenizerFlags.of(args)}


@dataclass(frozen=True)
class SaveFlags(Part):
    """Flags that determine when checkpoints are written and which of them are kept."""

    save: str | None
    save_interval: int | None
    async_save: bool
    save_keep_last: int | None
    save_retain_interval: int | None


@dataclass(frozen=True)
class LoopFlags(Part):
    """Flags that set what happens between two steps, and at which intervals."""

    log_interval: int
    eval_interval: int | None
    iterations_to_skip: Sequence[int]
    check_weight_hash_across_dp_replicas_interval: int | None
    log_loss_per_rank: bool


@dataclass(frozen=True)
class EndFlags(Part):
    """Flags that can end a run before its last iteration."""

    exit_signal: str
    exit_signal_handler: bool
    exit_interval: int | None
    exit_duration_in_mins: int | None


@dataclass(frozen=True)
class GuardFlags(Part):
    """Flags that determine how bad iterations are detected and handled."""

    rerun_mode: str
    loss_spike_policy: str
    check_for_nan_in_loss_and_grad: bool
    fp16: bool
    save: str | None


@dataclass(frozen=True)
class EvaluationFlags(Part):
    """Flags that determine how the model is evaluated.

    ``samples`` is None without --sample-prompt.
    """

    eval_iters: int
    eval_train_loss: bool
    full_validation: bool
    global_batch_size: int
    seq_length: int
    samples: SampleFlags | None

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"samples": SampleFlags.of(args) if args.sample_prompt else None}


@dataclass(frozen=True)
class ExpertFlags(Part):
    """Flags for balancing the load of the experts.

    ``layers`` says for each layer whether it has experts; prediction layers come last.
    """

    num_experts: int | None
    moe_router_load_balancing_type: str | list[str]
    moe_aux_loss_coeff: float | list[float]
    moe_z_loss_coeff: float | None
    moe_router_topk: int
    megatron_version: str
    layers: tuple[bool, ...]

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        layers = expert_layers(args)
        return {"layers": tuple(layers + (args.mtp_num_layers or 0) * layers[-1:])}


@dataclass(frozen=True)
class ModelFlags(Part):
    """Flags from which a GPT model is built, in addition to the model's configuration.

    ``yarn_scale`` is YaRN's factor for queries and keys.
    """

    normalization: str
    qk_layernorm: bool
    multi_latent_attention: bool
    num_experts: int | None
    moe_shared_expert_gate: bool
    mtp_num_layers: int | None
    add_attention_bias: bool
    padded_vocab_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    position_embedding_type: str
    rotary_percent: float
    rotary_base: float
    rotary_seq_len_interpolation_factor: float | None
    use_rope_scaling: bool
    rope_scaling_type: str
    rope_scaling_factor: float
    rope_scaling_original_max_position_embeddings: int
    rope_scaling_low_freq_factor: float
    rope_scaling_high_freq_factor: float
    rotary_scaling_factor: float
    yarn_original_max_position_embeddings: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_correction_range_round_to_int: bool
    yarn_scale: float

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        has_yarn = args.position_embedding_type == "yarn"
        return {"yarn_scale": rotary_flags.concentration(args) if has_yarn else 1.0}


@dataclass(frozen=True)
class ScheduleFlags(Part):
    """Flags that define the schedules of the learning rate and the weight decay."""

    lr: float
    min_lr: float
    lr_warmup_init: float
    lr_warmup_fraction: float | None
    lr_warmup_iters: int
    lr_warmup_samples: int
    lr_decay_iters: int | None
    lr_decay_samples: int | None
    lr_decay_style: str
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_samples: int | None
    lr_wsd_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    use_checkpoint_opt_param_scheduler: bool
    override_opt_param_scheduler: bool
    train_iters: int
    train_samples: int | None
    global_batch_size: int

    def in_samples(self) -> tuple[int, int, float, int | None]:
        """Return the lengths of the run, the decay, the warm-up and the WSD decay, each in samples."""
        unit, names = self.global_batch_size, "iters"
        if self.train_samples is not None:
            unit, names = 1, "samples"
        words = (f"train_{names}", f"lr_decay_{names}", f"lr_warmup_{names}", f"lr_wsd_decay_{names}")
        total, decay, warmup, last = (value and value * unit for value in map(self.__getattribute__, words))
        if self.lr_warmup_fraction is not None:
            warmup = self.lr_warmup_fraction * decay
        return total, decay, warmup, last
