"""Checkpoints as files: names, tracker, description, and whether a run can go on from one.

Neither torch nor Megatron is needed to read them.

``<dir>/latest_checkpointed_iteration.txt`` names the newest ``<dir>/iter_0000010/``, as in Megatron. Beside
what ``megatron.core.dist_checkpointing`` writes, each has ``arguments.json``: the run's flags and position.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_npu import files
from megatron_npu.errors import UsageError
from megatron_npu.training import latent_flags

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # Megatron's name, in tracker and directory, for weights that no run has trained here
DESCRIPTION = "arguments.json"
DESCRIPTION_OF_TRAIN = "run.json"  # the same of ``megatron-npu train``
COMMON = "common.pt"  # megatron-core's name for what is not sharded; since 0.19 an object beside the weights:
COMMON_OBJECT = "common_state/shard_0_1"
INDEX = ".metadata"  # torch's name for what says where each tensor is; written when all shards are
FILES = (COMMON, "metadata.json", INDEX)  # of megatron-core, beside those with the weights
OF_FSDP = "fsdp_dtensor"  # upstream's name for the format of Megatron's FSDP, and its optimizer's sharding
HF_FOLDER = "hf"  # in a converted checkpoint: the files of Hugging Face that came with the weights
# What decides the shapes of the weights and what is computed with them: (attribute, its flag).
_SAME_MODEL = (
    ("num_layers", "--num-layers"),
    ("hidden_size", "--hidden-size"),
    ("num_attention_heads", "--num-attention-heads"),
    ("num_query_groups", "--num-query-groups"),
    ("kv_channels", "--kv-channels"),
    ("ffn_hidden_size", "--ffn-hidden-size"),
    ("tokenizer_vocab_size", "the vocabulary's size"),
    ("position_embedding_type", "--position-embedding-type"),
    ("normalization", "--normalization"),
    ("layernorm_zero_centered_gamma", "--apply-layernorm-1p"),
    ("layernorm_epsilon", "--norm-epsilon"),
    ("rotary_percent", "--rotary-percent"),
    ("rotary_base", "--rotary-base"),
    ("rotary_interleaved", "--rotary-interleaved"),
    ("use_rope_scaling", "--use-rope-scaling"),
    ("rope_scaling_factor", "--rope-scaling-factor"),
    ("swiglu", "--swiglu"),
    ("add_bias_linear", "--disable-bias-linear"),
    ("add_qkv_bias", "--add-qkv-bias"),
    ("qk_layernorm", "--qk-layernorm"),
    ("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
    ("num_experts", "--num-experts"),
    ("multi_latent_attention", "--multi-latent-attention"),
    ("mtp_num_layers", "--mtp-num-layers"),
)
# Values of checkpoints that are older than the flags.
_BEFORE = {"multi_latent_attention": False}
# The same of a model with multi-latent attention.
_SAME_LATENT = tuple((name, f"--{name.replace('_', '-')}") for name in latent_flags.NAMES)
# The same of a model with experts.
_SAME_EXPERTS = tuple(
    (name, f"--{name.replace('_', '-')}")
    for name in """
    moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    """.split()
)
_MODEL_PARALLEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_EXPERT_PARALLEL_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk.

    Attributes:
        path: its own directory.
        iteration: the iterations that it has seen.
        consumed_train_samples, consumed_valid_samples: position in the data.
        has_optimizer, has_rng: whether it holds them.
        optimizer_sharding: megatron-core's name for how a distributed optimizer was cut; else None.
        arguments: the flags of the run that wrote it, with what followed from them.
    """

    path: Path
    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    has_optimizer: bool
    has_rng: bool
    optimizer_sharding: str | None
    arguments: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """Whether the driver has saved it, not one of Megatron-LM's own scripts."""
        return (self.path / DESCRIPTION).is_file()


def directory(root: str | Path, iteration: int) -> Path:
    """Return where the checkpoint of an iteration lies."""
    return Path(root) / f"iter_{iteration:07d}"


def unfinished(root: str | Path) -> list[Path]:
    """Return where checkpoints were being written when their run was killed."""
    return sorted(Path(root).glob(files.partial_folder(Path("iter_*")).name))


def missing(path: Path) -> list[str]:
    """Return which of megatron-core's files a checkpoint's own directory lacks."""
    wanted = FILES[2:] if is_of_fsdp(path) else FILES
    absent = [name for name in wanted if not (path / name).is_file()]
    if COMMON in absent and common_lies_among_shards(path):
        absent.remove(COMMON)
    return absent


def is_of_fsdp(path: Path) -> bool:
    """Return whether the driver has saved a checkpoint of Megatron's FSDP: it has torch's files alone."""
    try:
        values = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("optimizer_sharding") == OF_FSDP


def common_lies_among_shards(path: Path) -> bool:
    """Return whether what is not sharded is an object beside the weights, as 0.19 and newer write it.

    The index of a checkpoint's parts is a pickle: the name is looked for in its bytes, nothing is loaded.
    """
    index = path / INDEX
    return index.is_file() and COMMON_OBJECT.encode() in index.read_bytes()


def find(root: str | Path, step: int | None = None) -> CheckpointInfo | None:
    """Return the newest checkpoint under ``root``, None if there is none; or that of an iteration.

    Raises:
        UsageError: the one that tracker or ``step`` names is not there, or has no readable description.
    """
    place = newest(root, step)
    return None if place is None else _read(place)


def existing(root: str | Path, step: int | None = None) -> CheckpointInfo:
    """Return the newest checkpoint under ``root``, or that of an iteration.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    found = find(root, step)
    if found is None:
        raise no_checkpoint(root)
    return found


def no_checkpoint(root: str | Path) -> UsageError:
    """Return the error for a directory that was to have a checkpoint."""
    return UsageError(
        f"--load {root}: no checkpoint there", f"a directory with {TRACKER}", "Correct the path."
    )


def newest(root: str | Path, step: int | None = None) -> Path | None:
    """Return the directory of the newest checkpoint under ``root``, None if there is none.

    Args:
        step: the iteration of the one to be returned instead (``--ckpt-step``).

    Raises:
        UsageError: the tracker or ``step`` names one that is not there.
    """
    if step is not None:
        return _of_iteration(root, step)
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not text.isdecimal():
        raise UsageError(f"{tracker}: {text[:40]!r}", "a number of iterations", "Write it into the file.")
    path = Path(root) / RELEASE if text == RELEASE else directory(root, int(text))
    if not path.is_dir():
        raise UsageError(
            f"{tracker} names {path.name}, which is not there",
            "the name of a checkpoint in the same directory",
            "Write the iteration of one that is complete into the file.",
        )
    return path


def _of_iteration(root: str | Path, step: int) -> Path:
    path = directory(root, step)
    if not path.is_dir():
        there = ", ".join(map(str, iterations(root))) or "none"
        raise UsageError(
            f"--ckpt-step {step}: no {path.name} in {root}",
            f"the iteration of a checkpoint that is there: {there}",
            "Give one of them, or leave --ckpt-step out for the newest." if there != "none" else "Drop it.",
        )
    return path


def iterations(root: str | Path) -> list[int]:
    """Return the iterations of the checkpoints under ``root``, in order."""
    names = (path.name.removeprefix("iter_") for path in Path(root).glob("iter_*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def _read(path: Path) -> CheckpointInfo:
    description = path / DESCRIPTION
    try:
        values = json.loads(description.read_text(encoding="utf-8"))
        found = CheckpointInfo(path=path, **values)
        _require_sound(found)
        return found
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{description}: {reason}",
            "the description that `megatron-npu pretrain` writes into each checkpoint",
            "Load a checkpoint of this driver.",
        ) from error


def _require_sound(found: CheckpointInfo) -> None:
    """Check that a description can be one.

    Raises:
        ValueError: saying what cannot be.
    """
    for name in ("iteration", "consumed_train_samples", "consumed_valid_samples"):
        value = getattr(found, name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} {value!r}")
    if not isinstance(found.arguments, dict) or "num_layers" not in found.arguments:
        raise ValueError("its arguments do not describe a model")


def relocated(root: str | Path, path: str | None) -> str | None:
    """Return ``path`` if it is there; else what has its name in the checkpoint's directory, if anything.

    A converted checkpoint brings its tokenizer along, and may have been moved.
    """
    if path is None or Path(path).exists():
        return path
    places = (Path(root) / HF_FOLDER / Path(path).name, Path(root) / Path(path).name)
    return next((str(place) for place in places if place.exists()), path)


def describe(path: Path, found: CheckpointInfo) -> None:
    """Write the description of a checkpoint into ``path``."""
    values = {name: value for name, value in vars(found).items() if name != "path"}
    files.write(path / DESCRIPTION, json.dumps(values, indent=1))


def plain_arguments(args: Namespace) -> dict[str, Any]:
    """Return the flags that JSON can hold, without those of this machine and process."""
    local = {"rank", "local_rank", "load_from", "load_optim", "load_rng"}
    return {name: value for name, value in sorted(vars(args).items()) if name not in local}


def release(root: str | Path, path: Path) -> Path:
    """Make a checkpoint the one that no run has trained here; return its new place."""
    place = Path(root) / RELEASE
    path.rename(place)
    files.write(Path(root) / TRACKER, f"{RELEASE}\n")
    return place


def set_latest(root: str | Path, iteration: int) -> None:
    """Make the tracker name ``iteration``."""
    files.write(Path(root) / TRACKER, f"{iteration}\n")


def require_same_model(found: CheckpointInfo, args: Namespace) -> None:
    """Check that a checkpoint holds the model that the flags describe.

    Args:
        found: the checkpoint.
        args: the flags of the run that is to load it, with what follows from them.

    Raises:
        UsageError: naming the flags that differ.
    """
    names = list(_SAME_MODEL)
    if args.num_experts is not None:
        names += _SAME_EXPERTS
    if args.multi_latent_attention:
        names += _SAME_LATENT
    if args.position_embedding_type == "learned_absolute":
        names.append(("max_position_embeddings", "--max-position-embeddings"))
    if args.add_bias_linear and not args.swiglu:
        names.append(("bias_gelu_fusion", "--no-bias-gelu-fusion"))  # which computes another form of GELU
    saved = _BEFORE | found.arguments
    differing = [
        f"{flag} {_shown(getattr(args, name))} (the checkpoint: {_shown(saved.get(name))})"
        for name, flag in names
        if saved.get(name) != getattr(args, name)
    ]
    if differing:
        raise UsageError(
            f"--load {found.path} holds another model: {', '.join(differing)}",
            "the checkpoint's values",
            "Give the flags that it was trained with, or load another checkpoint.",
        )


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def same_model_parallel_sizes(found: CheckpointInfo, args: Namespace) -> bool:
    """Return whether a run has the sizes that share the model, with which a checkpoint was saved."""
    return all(found.arguments.get(size) == getattr(args, size) for size in _sizes_of_sharing(args))


def _sizes_of_sharing(args: Namespace) -> tuple[str, ...]:
    return _MODEL_PARALLEL_SIZES + (_EXPERT_PARALLEL_SIZES if args.num_experts is not None else ())


def require_readable_shards(found: CheckpointInfo, args: Namespace) -> None:
    """Check that what Megatron's FSDP has saved, and this alone, is to be read into it.

    Args:
        found: the checkpoint.
        args: the flags of the run that is to load it, ``load_optim`` among them.

    Raises:
        UsageError: only one of checkpoint and run is of Megatron's FSDP, or they differ in precision or the
            padding of the vocabulary.
    """
    of_fsdp, into_fsdp = is_of_fsdp(found.path), args.fully_sharded == "megatron"
    if into_fsdp and not of_fsdp:
        raise UsageError(
            f"--load {found.path} with --{args.sharding}-memory-optimization",
            "a checkpoint of a run with zero-2 or zero-3: Megatron's FSDP reads its own format alone",
            "Use --fsdp-memory-optimization, which goes on with all others.",
        )
    if of_fsdp and not into_fsdp and args.load_optim:
        raise UsageError(
            f"--load {found.path}, whose optimizer Megatron's FSDP has shared out",
            "--zero-2-memory-optimization or --zero-3-memory-optimization, on two data-parallel ranks",
            "Add it, or give --no-load-optim, or --finetune: any run reads the weights.",
        )
    saved, own = (
        "16 bits" if flags.get("bf16") or flags.get("fp16") else "fp32"
        for flags in (found.arguments, vars(args))
    )
    if into_fsdp and saved != own:
        raise UsageError(
            f"--load {found.path} was trained in {saved}, and this run is in {own}",
            "the same: another wrapper is in the names of all weights",
            "Change --mixed-precision, or use --fsdp-memory-optimization from the beginning.",
        )
    if of_fsdp and found.arguments.get("padded_vocab_size") != args.padded_vocab_size:
        raise UsageError(
            f"--load {found.path} has a vocabulary of {found.arguments.get('padded_vocab_size')} tokens with "
            f"its padding, and this run {args.padded_vocab_size}",
            "the same",
            "Give its --make-vocab-size-divisible-by.",
        )


def require_loadable_optimizer(found: CheckpointInfo, args: Namespace) -> None:
    """Check that the optimizer of a checkpoint can go on in a run's layout.

    Args:
        found: the checkpoint, which has an optimizer.
        args: the flags of the run that is to load it, with what follows from them.

    Raises:
        UsageError: it is of another kind, or sharded for other sizes.
    """
    saved = found.arguments.get("optimizer", "adam")
    if saved != args.optimizer:
        raise UsageError(
            f"--load {found.path} was saved with --optimizer {saved}, this run has {args.optimizer}",
            "the same",
            "Change --optimizer, or give --no-load-optim.",
        )
    kinds = {True: "the distributed optimizer", False: "the plain optimizer"}
    distributed = bool(found.arguments.get("use_distributed_optimizer"))
    if distributed != args.use_distributed_optimizer:
        raise UsageError(
            f"--load {found.path} was saved with {kinds[distributed]}, this run has "
            f"{kinds[args.use_distributed_optimizer]}",
            "the same kind",
            "Change --use-distributed-optimizer, or give --no-load-optim.",
        )
    apart = int(found.arguments.get("expert_model_parallel_size", 1)) > 1
    if apart != (args.expert_model_parallel_size > 1):
        raise UsageError(
            f"--load {found.path} was saved {'with' if apart else 'without'} --expert-model-parallel-size, "
            f"this run is {'without' if apart else 'with'} it",
            "both with it, of any size, or both without: the optimizer keeps experts apart with it alone",
            "Change it, or give --no-load-optim.",
        )
    same = same_model_parallel_sizes(found, args)
    if distributed and not same and found.optimizer_sharding == "dp_reshardable":
        sizes = (f"{name.replace('_', ' ')} {found.arguments.get(name)}" for name in _sizes_of_sharing(args))
        raise UsageError(
            f"--load {found.path}: its distributed optimizer can change the data-parallel size only",
            " and ".join(sizes),
            "Give --no-load-optim, or save it with --dist-ckpt-optim-fully-reshardable.",
        )
