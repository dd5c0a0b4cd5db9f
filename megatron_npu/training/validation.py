"""Cross-checks of the flags, before anything is built: bad input ends here, with one line each.

``check`` also fills in what follows from the flags (head size, data-parallel size, number of micro batches),
as Megatron does, so that the rest of the driver reads plain values.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_npu import devices, upstream
from megatron_npu.errors import UsageError
from megatron_npu.preprocessing import indexed_dataset
from megatron_npu.training import checkpoint_files, tokenizers


def check(args: Namespace) -> Namespace:
    """Return the flags with everything that follows from them; the given ones are left as they are.

    Raises:
        UsageError: a flag, a file, the machine or a checkpoint does not fit the others.
    """
    args = Namespace(**vars(args))
    _ranges(args)
    _machine(args)
    _model(args)
    _attention(args)
    _layout(args)
    _batches(args)
    _optimizer(args)
    _recompute(args)
    _logging(args)
    _data(args)
    _checkpoints(args)
    _places(args)
    return args


def _fail(given: str, expected: str, remedy: str) -> None:
    raise UsageError(given, expected, remedy)


def _divides(divisor: int, what: str, number: int, of: str) -> None:
    """Check that ``divisor`` divides ``number``; both are named in the message."""
    if number % divisor:
        _fail(f"{of} {number}", f"a multiple of {what} = {divisor}", "Change one of the two.")


# What megatron-core ends in an assertion for, deep inside, or computes nonsense with.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "attention-dropout hidden-dropout adam-beta1 adam-beta2",
        lambda value: 0 <= value < 1,
        "a number from 0 to below 1",
    ),
    ("clip-grad weight-decay init-method-std adam-eps", lambda value: value >= 0, "a number from 0 on"),
    (
        "rotary-base rope-scaling-factor norm-epsilon loss-scale initial-loss-scale min-loss-scale",
        lambda value: value > 0,
        "a number above 0",
    ),
    ("rotary-percent", lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    ("seed", lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295"),
)


def _ranges(args: Namespace) -> None:
    for flags, fits, expected in _RANGES:
        for flag in flags.split():
            field = "layernorm_epsilon" if flag == "norm-epsilon" else flag.replace("-", "_")
            value = getattr(args, field)
            if value is not None and not fits(value):
                _fail(f"--{flag} {value}", expected, "Change it.")


def _machine(args: Namespace) -> None:
    found = upstream.find()
    found.require_supported()
    if found.name != "megatron_core":
        _fail(
            f"the Megatron in {found.root} is {found.name} {found.version}",
            "megatron-core",
            "Use its own script with `megatron-npu run`, or pip install megatron-core==0.16.1.",
        )
    args.megatron_version = found.version
    args.rank = int(os.environ.get("RANK", "0"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = devices.current()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > device.count():
        _fail(
            f"{local} processes on a machine with {device.count()} {device.name} device(s)",
            "at most one process a device",
            "Give torchrun a smaller --nproc-per-node.",
        )
    if args.use_cpu_initialization is None:
        args.use_cpu_initialization = device.is_host
    if args.num_workers is None:
        args.num_workers = 0 if device.is_host else 2


def _model(args: Namespace) -> None:
    if args.kv_channels is None:
        _divides(args.num_attention_heads, "--num-attention-heads", args.hidden_size, "--hidden-size")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        # 8/3 keeps the number of parameters of a gated layer (arXiv:2002.05202); whole 64s as Megatron
        args.ffn_hidden_size = (
            int(4 * args.hidden_size * 2 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
        ) or 64
    if args.group_query_attention:
        _divides(args.num_query_groups, "--num-query-groups", args.num_attention_heads, "attention heads")
    else:
        args.num_query_groups = args.num_attention_heads
    args.bias_gelu_fusion = args.bias_gelu_fusion and args.add_bias_linear  # as Megatron
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.seq_length > args.max_position_embeddings:
        _fail(
            f"--seq-length {args.seq_length}",
            f"at most --max-position-embeddings {args.max_position_embeddings}",
            "Shorten the sequence or raise the number of positions.",
        )
    if args.bf16 and args.fp16:
        _fail("--bf16 and --fp16", "one of them or none", "Drop one.")
    if args.position_embedding_type == "rope":
        rotated = -(-int(args.kv_channels * args.rotary_percent) // 2) * 2  # megatron-core rounds up to pairs
        if not 2 <= rotated <= args.kv_channels:
            _fail(
                f"--rotary-percent {args.rotary_percent} of --kv-channels {args.kv_channels}",
                "at least one pair of channels, and no more than there are",
                "Change one of the two.",
            )


def _attention(args: Namespace) -> None:
    if args.use_flash_attn:
        args.attention_backend = "flash"
    windowed = args.pre_tokens is not None or args.next_tokens is not None
    if args.attention_backend in ("unfused", "local") and (windowed or args.shape_order != "SBH"):
        _fail(
            f"--pre-tockens, --next-tockens or --shape-order with --attention-backend "
            f"{args.attention_backend}",
            "a fused backend, for which these flags are meant",
            "Leave --attention-backend out.",
        )


def _layout(args: Namespace) -> None:
    tensor, pipeline, context = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    _divides(
        tensor * pipeline * context,
        "tensor x pipeline x context parallel sizes",
        args.world_size,
        "the number of processes",
    )
    args.data_parallel_size = args.world_size // (tensor * pipeline * context)
    _divides(tensor, "--tensor-model-parallel-size", args.num_attention_heads, "--num-attention-heads")
    _divides(tensor, "--tensor-model-parallel-size", args.num_query_groups, "--num-query-groups")
    _divides(tensor, "--tensor-model-parallel-size", args.ffn_hidden_size, "--ffn-hidden-size")
    _divides(pipeline, "--pipeline-model-parallel-size", args.num_layers, "--num-layers")
    args.sequence_parallel = args.sequence_parallel and tensor > 1  # as Megatron
    pieces = context * 2 if context > 1 else 1  # each rank has two, see megatron.core.utils
    pieces *= tensor if args.sequence_parallel else 1
    _divides(pieces, "2 x context x (with sequence parallelism) tensor size", args.seq_length, "--seq-length")
    _interleaving(args, args.num_layers // pipeline)
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        _fail(
            "--overlap-param-gather",
            "--use-distributed-optimizer and --overlap-grad-reduce beside it",
            "Add both.",
        )


def _interleaving(args: Namespace, layers_of_a_stage: int) -> None:
    layers, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    args.virtual_pipeline_model_parallel_size = None
    if layers is None and stages is None:
        return
    if layers is not None and stages is not None:
        _fail(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank",
            "one of them",
            "Drop one.",
        )
    flag = "--num-layers-per-virtual-pipeline-stage" if layers else "--num-virtual-stages-per-pipeline-rank"
    if args.pipeline_model_parallel_size == 1:
        _fail(flag, "--pipeline-model-parallel-size of at least 2", "Raise it, or drop the flag.")
    _divides(layers or stages, flag, layers_of_a_stage, "layers of a pipeline stage")
    size = layers_of_a_stage // layers if layers else stages
    args.virtual_pipeline_model_parallel_size = size if size > 1 else None
    if size > 1 and args.pipeline_model_parallel_size == 2 and not args.overlap_p2p_comm:
        _fail(
            "an interleaved pipeline of 2 stages with --no-overlap-p2p-communication",
            "overlapped p2p (batched sends of two chunks to one neighbour cannot be told apart)",
            "Drop --no-overlap-p2p-communication.",
        )


def _batches(args: Namespace) -> None:
    at_once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = at_once
    _divides(at_once, "micro batch size x data-parallel size", args.global_batch_size, "--global-batch-size")
    args.num_microbatches = args.global_batch_size // at_once
    if args.virtual_pipeline_model_parallel_size is not None:
        _divides(
            args.pipeline_model_parallel_size,
            "the pipeline stages, which interleaving requires",
            args.num_microbatches,
            "the number of micro batches",
        )


def _optimizer(args: Namespace) -> None:
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    if args.lr is None:
        if args.train_iters:
            _fail("no --lr", "the highest learning rate", "Give one, for example --lr 1e-3.")
        args.lr = args.min_lr
    if not 0 <= args.min_lr <= args.lr:
        _fail(f"--min-lr {args.min_lr}", f"from 0 to --lr {args.lr}", "Change one of the two.")
    if not 0 <= args.lr_warmup_init <= args.lr:
        _fail(f"--lr-warmup-init {args.lr_warmup_init}", f"from 0 to --lr {args.lr}", "Change it.")
    args.lr_decay_iters = args.lr_decay_iters or max(args.train_iters, 1)
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters:
            _fail("--lr-warmup-fraction and --lr-warmup-iters", "one of them", "Drop one.")
        if not 0 <= args.lr_warmup_fraction < 1:
            _fail(f"--lr-warmup-fraction {args.lr_warmup_fraction}", "from 0 to below 1", "Change it.")
    elif args.lr_warmup_iters >= args.lr_decay_iters:
        _fail(
            f"--lr-warmup-iters {args.lr_warmup_iters}",
            f"less than the {args.lr_decay_iters} iterations of the decay",
            "Lower it, or raise --lr-decay-iters or --train-iters.",
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        _fail("--lr-decay-style WSD", "--lr-wsd-decay-iters beside it", "Add it.")
    _weight_decay(args)
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        _fail("both --override- and --use-checkpoint-opt_param-scheduler", "one of them", "Drop one.")


def _weight_decay(args: Namespace) -> None:
    given = (args.start_weight_decay, args.end_weight_decay)
    if args.weight_decay_incr_style == "constant":
        if given != (None, None):
            _fail(
                "--start-weight-decay or --end-weight-decay",
                "--weight-decay-incr-style linear or cosine beside them",
                "Add it, or give --weight-decay alone.",
            )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif None in given or not 0 <= given[0] <= given[1]:
        _fail(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} from {given[0]} to {given[1]}",
            "--start-weight-decay from 0 to --end-weight-decay",
            "Give both.",
        )


def _recompute(args: Namespace) -> None:
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full" and None in (args.recompute_method, args.recompute_num_layers):
        _fail(
            "--recompute-granularity full",
            "--recompute-method and --recompute-num-layers beside it",
            "Add them.",
        )
    if args.recompute_granularity != "full" and args.recompute_method is not None:
        _fail("--recompute-method", "--recompute-granularity full beside it", "Add it, or drop the method.")


def _logging(args: Namespace) -> None:
    if args.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
        _fail("--tensorboard-dir, but tensorboard is not installed", "tensorboard", "pip install tensorboard")
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if args.plot and not has_matplotlib:
        _fail("--plot, but matplotlib is not installed", "matplotlib", "pip install matplotlib")
    if args.plot and not (args.save or args.tensorboard_dir):
        _fail("--plot", "--save or --tensorboard-dir, into which it goes", "Add one.")
    if args.plot is None:
        args.plot = has_matplotlib and bool(args.save or args.tensorboard_dir)


def _data(args: Namespace) -> None:
    if args.load:  # flags.txt of a converted checkpoint names files of its folder, which may have been moved
        for name in ("vocab_file", "merge_file", "tokenizer_model"):
            setattr(args, name, checkpoint_files.near(args.load, getattr(args, name)))
    tokenizer = tokenizers.build(args)
    args.tokenizer_vocab_size = tokenizers.model_vocabulary(args, tokenizer)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.tokenizer_vocab_size // multiple) * multiple
    shares = _split(args.split)
    if args.mock_data and args.data_path:
        _fail("--mock-data and --data-path", "one of them", "Drop one.")
    args.has_data = bool(args.mock_data or args.data_path)
    if not args.has_data:
        if args.train_iters or not args.save:
            _fail("no --data-path", "the prefix of a dataset, or --mock-data", "Give one.")
        return
    _require_parts(args, shares, "")
    if args.data_path:
        _, prefixes = blend(args.data_path)
        for prefix in prefixes:
            documents = indexed_dataset.validate(prefix, tokenizer.vocab_size).documents
            _require_parts(args, _documents_of_parts(shares, documents), f" of the {documents} in {prefix}")


def _require_parts(args: Namespace, parts: Sequence[float], of: str) -> None:
    """Refuse an empty part that is read: megatron-core 0.12 to 0.16 would look for its tokens for ever."""
    for name, part, needed in zip(
        ("training", "validation"), parts, (args.train_iters, args.eval_iters), strict=False
    ):
        if needed and part <= 0:
            _fail(
                f"--split {args.split!r} leaves no document{of} for {name}",
                "a share above 0, and documents enough for it",
                "Change --split" + ("." if name == "training" else ", or give --eval-iters 0."),
            )


def _documents_of_parts(shares: Sequence[float], documents: int) -> list[int]:
    """Return how many documents megatron-core gives to each part."""
    bounds = [round(sum(shares[:part]) / sum(shares) * documents) for part in range(4)]
    return [last - first for first, last in itertools.pairwise(bounds)]


def _split(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        _fail(f"--split {text!r}", "up to three numbers with commas between", "For example 969,30,1.")
    return [*shares, 0.0, 0.0][:3]


def blend(words: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Read ``--data-path``: prefixes alone, or a weight before each; return weights (or None) and prefixes.

    Raises:
        UsageError: weights before some prefixes only, or one that is not above 0.
    """
    weights = [_number(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return None, list(words)
    if len(words) % 2 or None in weights or min(filter(None.__ne__, weights)) <= 0:
        _fail(
            f"--data-path {' '.join(words)}",
            "prefixes, or a weight above 0 before each prefix",
            "Write for example --data-path 0.7 first 0.3 second.",
        )
    return weights, list(words[1::2])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# What decides the shapes of the weights and what is computed with them: (attribute, its flag).
SHAPES = (
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
)


def _checkpoints(args: Namespace) -> None:
    if args.save_interval and not args.save:
        _fail("--save-interval", "--save DIR beside it", "Add --save.")
    found = _find_checkpoint(args)
    args.load_from = None if found is None else str(found.path)
    if found is not None:
        _same_shape(args, found)
        _loadable_optimizer(args, found)
    _spare(args, found)


def _same_directory(one: str | None, other: str | None) -> bool:
    return bool(one and other) and Path(one).resolve() == Path(other).resolve()


def _find_checkpoint(args: Namespace) -> checkpoint_files.Found | None:
    if not args.load:
        return None
    found = checkpoint_files.find(args.load)
    if found is None and not _same_directory(args.load, args.save):
        _fail(
            f"--load {args.load}: no checkpoint there",
            f"a directory with {checkpoint_files.TRACKER}",
            "Correct the path, or leave --load out to begin anew.",
        )
    return found


def _same_shape(args: Namespace, found: checkpoint_files.Found) -> None:
    names = list(SHAPES)
    if args.position_embedding_type == "learned_absolute":
        names.append(("max_position_embeddings", "--max-position-embeddings"))
    if args.add_bias_linear and not args.swiglu:
        names.append(("bias_gelu_fusion", "--no-bias-gelu-fusion"))  # which computes another form of GELU
    differing = [
        f"{flag} {_shown(getattr(args, name))} (the checkpoint: {_shown(found.arguments[name])})"
        for name, flag in names
        if name in found.arguments and found.arguments[name] != getattr(args, name)
    ]
    if differing:
        _fail(
            f"--load {found.path} holds another model: {', '.join(differing)}",
            "the checkpoint's values",
            "Give the flags that it was trained with, or load another checkpoint.",
        )


def _shown(value: object) -> object:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _loadable_optimizer(args: Namespace, found: checkpoint_files.Found) -> None:
    args.load_optim = not (args.finetune or args.no_load_optim) and found.has_optimizer
    args.load_rng = not (args.finetune or args.no_load_rng) and found.has_rng
    if not args.load_optim:
        return
    kinds = {True: "the distributed optimizer", False: "the plain optimizer"}
    distributed = bool(found.arguments.get("use_distributed_optimizer"))
    if distributed != args.use_distributed_optimizer:
        _fail(
            f"--load {found.path} was saved with {kinds[distributed]}, this run has "
            f"{kinds[args.use_distributed_optimizer]}",
            "the same kind",
            "Change --use-distributed-optimizer, or give --no-load-optim.",
        )
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    same = all(found.arguments.get(size) == getattr(args, size) for size in sizes)
    if distributed and not same and found.optimizer_sharding == "dp_reshardable":
        _fail(
            f"--load {found.path}: its distributed optimizer can change the data-parallel size only",
            " and ".join(f"{size.replace('_', ' ')} {found.arguments.get(size)}" for size in sizes),
            "Give --no-load-optim, or save it with --dist-ckpt-optim-fully-reshardable.",
        )


def _spare(args: Namespace, found: checkpoint_files.Found | None) -> None:
    """Check that saving will not write over the checkpoints of another run."""
    if not args.save:
        return
    if Path(args.save).exists() and not Path(args.save).is_dir():
        _fail(f"--save {args.save} is a file", "a directory", "Give another path.")
    goes_on = found is not None and _same_directory(args.save, args.load) and not args.finetune
    if not goes_on and (Path(args.save) / checkpoint_files.TRACKER).exists():
        _fail(
            f"--save {args.save} holds checkpoints already",
            "an empty directory, or one that this run goes on from",
            f"Add --load {args.save} to go on, or give another directory.",
        )


def _places(args: Namespace) -> None:
    """Check that what is written later can be: after hours of training is no time to find out."""
    if args.rank:  # on other machines there may be no such places, and only the first process writes to all
        return
    log = args.json_log and os.path.dirname(os.path.abspath(args.json_log))
    for flag, place in (
        ("--save", args.save),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--data-cache-path", args.data_cache_path),
        ("--json-log", log),
    ):
        if place:
            _require_writable(flag, Path(place).absolute())


def _require_writable(flag: str, place: Path) -> None:
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir():
        _fail(f"{flag}: {there} is a file", "a directory", "Give another path.")
    if not os.access(there, os.W_OK | os.X_OK):
        _fail(f"{flag}: {there} cannot be written", "a directory of yours", "Give another path.")


def describe(names: Iterable[str], args: Namespace) -> str:
    """Return ``name value`` pairs for a log line."""
    return ", ".join(f"{name.replace('_', ' ')} {getattr(args, name)}" for name in names)
