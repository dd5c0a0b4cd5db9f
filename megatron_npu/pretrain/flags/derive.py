"""Set values that are derived from the flags, as Megatron does. Each function only sets values.

Only this module modifies flags. The checks of each group (``checks``) call these functions once the required
values are valid; finally, ``validation.check`` freezes the flags.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_npu import devices
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.options import memory_flags
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.pretrain.flags.batch_ramp import Ramp

NOTHING: Mapping[str, str | None] = MappingProxyType({})


def version(args: Namespace, of_core: str) -> None:
    """Store megatron-core's version in the flags."""
    args.megatron_version = of_core


def process(args: Namespace) -> None:
    """Store this process's ranks in the flags, and the defaults that depend on the device."""
    args.rank = int(os.environ.get("RANK", "0"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = devices.current()
    if args.use_cpu_initialization is None:
        # on the host expert-parallel ranks would draw the same weights for different experts
        args.use_cpu_initialization = device.is_host and args.expert_model_parallel_size == 1
    if args.num_workers is None:
        args.num_workers = 0 if device.is_host else 2


def model(args: Namespace) -> None:
    """Set the sizes of the layers, and the flags that other flags abbreviate."""
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        # 8/3 keeps the number of parameters of a gated layer (arXiv:2002.05202); whole 64s as Megatron
        args.ffn_hidden_size = (
            int(4 * args.hidden_size * 2 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
        ) or 64
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    args.bias_gelu_fusion = args.bias_gelu_fusion and args.add_bias_linear  # as Megatron
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    args.add_attention_bias = args.add_attention_bias and not args.add_bias_linear  # which has it as well
    args.add_qkv_bias = args.add_qkv_bias or args.add_attention_bias
    if args.use_flash_attn:
        args.attention_backend = "flash"


def latent(args: Namespace) -> None:
    """Set the rotary embedding type of multi-latent attention."""
    args.rope_type = args.rope_type or "yarn"


def precision(args: Namespace, wanted: str) -> None:
    """Set ``bf16`` or ``fp16`` according to ``--mixed-precision``."""
    setattr(args, wanted, True)


def sharding(args: Namespace, wrapper: str | None, strategy: str = "no_shard") -> None:
    """Set the FSDP implementation (``megatron``, ``torch`` or None), and Megatron's sharding strategy."""
    args.fully_sharded, args.fsdp_strategy = wrapper, strategy
    if wrapper is not None:
        args.gradient_accumulation_fusion = False  # adds into a buffer that FSDP does not have


def distributed_optimizer(args: Namespace) -> None:
    """Set whether the distributed optimizer is used."""
    args.use_distributed_optimizer = True


def offloaded_optimizer(args: Namespace, on: bool) -> None:
    """Set whether the optimizer is offloaded to the host, and the values that megatron-core then requires."""
    args.optimizer_cpu_offload, args.optimizer_offload_fraction = on, 1.0
    if on:
        args.use_precision_aware_optimizer = True
        args.use_distributed_optimizer = True  # which the offloaded optimizer is a part of


def precision_aware_optimizer(args: Namespace) -> None:
    """Set whether upstream's precision-aware optimizer is used."""
    args.use_precision_aware_optimizer = memory_flags.precision_aware_optimizer(args)


def recompute_all(args: Namespace) -> None:
    """Set the recomputation flags that ``--checkpoint-activations`` implies."""
    if args.recompute_granularity is None:  # not by older_flags
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1


def experts(args: Namespace) -> None:
    """Set the hidden size of an expert (None in a dense model).

    A z-loss weight of 0 is replaced by None.
    """
    args.moe_z_loss_coeff = args.moe_z_loss_coeff or None  # which megatron-core divides by
    args.num_experts = args.num_experts or None  # megatron-core 0.12 writes 0
    if args.num_experts is None:
        args.moe_ffn_hidden_size = None
        return
    # scaled by the router's probability there is SwiGLU alone, and without biases (0.12 to 0.19)
    args.bias_gelu_fusion = False
    args.bias_swiglu_fusion = args.bias_swiglu_fusion and not args.add_bias_linear
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size


def expert_layers(args: Namespace) -> list[bool]:
    """Return, for each layer, whether it has experts, according to ``--moe-layer-freq``."""
    frequency = args.moe_layer_freq
    if args.num_experts is None:
        return [False] * args.num_layers
    if isinstance(frequency, list):
        return [bool(layer) for layer in frequency]
    return [number % frequency == 0 for number in range(args.num_layers)]


def expert_layout(args: Namespace) -> None:
    """Set the default of the expert-tensor-parallel size.

    By default, it equals the tensor-parallel size.
    """
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size


def recompute(args: Namespace) -> None:
    """Set the recomputation flags that ``--recompute-activations`` implies."""
    if args.recompute_activations:
        args.recompute_granularity = "selective"


def layout(args: Namespace) -> None:
    """Set the data-parallel size, and whether sequence parallelism is used."""
    args.data_parallel_size = args.world_size // model_parallel_size(args)
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1  # as Megatron


def model_parallel_size(args: Namespace) -> int:
    """Return the number of processes that share one copy of the model and one batch."""
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size


def interleaving(args: Namespace) -> None:
    """Set the number of chunks per pipeline stage, or None if the stages are not interleaved."""
    layers, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if layers is not None:
        chunks = args.num_layers // args.pipeline_model_parallel_size // layers
    args.virtual_pipeline_model_parallel_size = chunks if chunks is not None and chunks > 1 else None


def global_batch_size(args: Namespace) -> None:
    """Set the global batch size.

    By default, it is one micro-batch per data-parallel rank.
    """
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size


def micro_batches(args: Namespace) -> None:
    """Set the number of micro-batches per data-parallel rank and iteration."""
    args.num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)


def length(args: Namespace) -> None:
    """Record whether the run trains at all, before any data is read."""
    args.trains = args.train_iters != 0


def iterations(args: Namespace) -> None:
    """Set the number of iterations that correspond to the given samples or epochs."""
    samples = samples_in_all(args)
    if samples is not None:
        args.train_iters = _iterations(args, 0, samples)


def tokenizer_files(args: Namespace, root: str, given: Mapping[str, str | None] = NOTHING) -> None:
    """Set the current paths of the tokenizer's files.

    A converted checkpoint may have been moved.

    Args:
        args: arguments with the file paths under the names of their flags.
        root: the folder of the checkpoint.
        given: the files that the user named explicitly.
    """
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        setattr(args, name, given.get(name) or checkpoint_files.relocated(root, getattr(args, name)))


def vocabulary(args: Namespace, size: int) -> None:
    """Set the vocabulary size."""
    args.tokenizer_vocab_size = size


def tokenizer_hashes(args: Namespace, hashes: dict[str, str]) -> None:
    """Set the hashes of the tokenizer's files, which are stored in checkpoints."""
    args.tokenizer_files = hashes


def data(args: Namespace, there: bool) -> None:
    """Record whether the run has data, and reset the number of samples per epoch."""
    args.has_data, args.epoch_samples = there, None


def epoch(args: Namespace, samples: int) -> None:
    """Set the number of samples per epoch."""
    args.epoch_samples = samples


def last_good(args: Namespace, iteration: int | None) -> None:
    """Set the checkpoint that ``--load-last-good`` selects."""
    args.ckpt_step = iteration


def beginning(args: Namespace, place: Path | None) -> None:
    """Set the checkpoint to resume from, or None to start from the beginning."""
    args.load_from = None if place is None else str(place)


def loaded(args: Namespace, *, has_optimizer: bool, has_rng: bool) -> None:
    """Set which parts of the checkpoint, besides the weights, are loaded."""
    args.load_optim = not (args.finetune or args.no_load_optim) and has_optimizer
    args.load_rng = not (args.finetune or args.no_load_rng) and has_rng


def widened(args: Namespace) -> None:
    """Set the flags for building a trained model from fp32 modules."""
    args.bf16 = args.fp16 = False


def grouped_experts(args: Namespace) -> None:
    """Set whether the loaded model uses grouped experts.

    megatron-core 0.16 supports them only in bf16.
    """
    args.moe_grouped_gemm = args.moe_grouped_gemm and args.bf16


def samples_in_all(args: Namespace) -> int | None:
    """Return the total number of samples of a run, or None if its length is given in iterations."""
    if args.epochs is not None:
        return args.epochs * args.epoch_samples
    return args.train_samples


def iterations_from(args: Namespace, iteration: int, consumed_samples: int) -> None:
    """Set the last iteration of a resumed run if its length is given in samples.

    The batch size may have changed since the checkpoint.
    """
    samples = samples_in_all(args)
    if samples is not None:
        args.train_iters = iteration + _iterations(args, consumed_samples, samples)


def _iterations(args: Namespace, begin: int, end: int) -> int:
    """Return the number of complete global batches between two sample counts."""
    ramp = Ramp.of(args)
    return max(0, end - begin) // args.global_batch_size if ramp is None else ramp.iterations(begin, end)


def split(args: Namespace) -> None:
    """Set ``--split`` to Megatron's default if all splits come from the same data."""
    if args.split is None and not args.train_data_path:
        args.split = "969, 30, 1"


def optimizer(args: Namespace) -> None:
    """Set the dtype of gradients, and a default learning rate for runs that do not require one."""
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16 and args.main_grads_dtype == "fp32"
    if args.lr is None and not args.train_iters:
        args.lr = args.min_lr


def schedule(args: Namespace) -> None:
    """Set the end of the learning-rate decay in the same unit as the run's length."""
    if args.train_samples is not None:
        args.lr_decay_samples = args.lr_decay_samples or args.train_samples
    else:
        args.lr_decay_iters = args.lr_decay_iters or max(args.train_iters, 1)


def weight_decay(args: Namespace) -> None:
    """Set equal start and end values of the weight decay if it is constant."""
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay


def plot(args: Namespace) -> None:
    """Set whether the run writes a plot.

    This requires a destination and matplotlib.
    """
    if args.plot is None:
        args.plot = has_matplotlib() and bool(args.save or args.tensorboard_dir)


def has_matplotlib() -> bool:
    """Return True if matplotlib is installed."""
    return is_installed("matplotlib")


def padded_vocab_size(args: Namespace) -> None:
    """Set the number of embedding rows: the vocabulary size padded for the tensor-parallel ranks."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.tokenizer_vocab_size // multiple) * multiple


def no_step_graph(args: Namespace) -> None:
    """Disable the CUDA graph, because the device does not support CUDA graphs."""
    args.cuda_graph_impl = "none"
