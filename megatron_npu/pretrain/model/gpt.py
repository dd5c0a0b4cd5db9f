"""Build the GPT model, its optimizer and its schedule from flags, using megatron-core's classes.

Functions that fill a megatron-core config take all flags (``Flags``), because the fields of the config depend
on the installed version; each field has the name of its flag (``data_parallel.of_the_same_name``).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.options import memory_flags
from megatron_npu.options.attention_flags import AttentionFlags
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import ExpertFlags, ModelFlags, ScheduleFlags
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.model import data_parallel
from megatron_npu.pretrain.model.data_parallel import of_the_same_name

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig


_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype(flags: Flags) -> torch.dtype:
    """Return the dtype of weights and activations that the flags select."""
    return torch.bfloat16 if flags.bf16 else torch.float16 if flags.fp16 else torch.float32


def _activation(flags: Flags) -> dict[str, Any]:
    gated = flags.swiglu
    return {
        "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        "bias_activation_fusion": flags.bias_swiglu_fusion if gated else flags.bias_gelu_fusion,
    }


def _require_softmax(flags: Flags, known: set[str]) -> None:
    if flags.softmax_type != "vanilla" and "softmax_type" not in known:
        raise UsageError(
            f"--softmax-type {flags.softmax_type} requires megatron-core 0.15 or later, but an older "
            "version is installed",
            remedy="Remove the flag, or install that version.",
        )


def transformer_config(flags: Flags) -> TransformerConfig:
    """Return the model's configuration as megatron-core's ``TransformerConfig``.

    Its ``attention_flags`` contain the fused-attention flags.

    Raises:
        UsageError: megatron-core rejects the combination, or does not support the selected softmax.
    """
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if flags.multi_latent_attention else TransformerConfig
    values = of_the_same_name(kind, flags)
    interleaved = flags.virtual_pipeline_model_parallel_size is not None
    values |= {
        "num_moe_experts": flags.num_experts,
        "params_dtype": dtype(flags),
        "pipeline_dtype": dtype(flags),
        "attention_backend": AttnBackend[flags.attention_backend],
        "transformer_impl": "local",
        **_activation(flags),
        "deallocate_pipeline_outputs": True,
        # batched sends of two chunks to one neighbour carry no tag: with 2 stages they get mixed up
        "overlap_p2p_comm": flags.overlap_p2p_comm and interleaved,
        "batch_p2p_comm": not (flags.overlap_p2p_comm and interleaved),
    }
    # the loop's affair (--cuda-graph-impl); upstream would ask for TransformerEngine
    known = {field.name for field in dataclasses.fields(kind)} - {"cuda_graph_impl", "cuda_graph_scope"}
    _require_softmax(flags, known)
    try:
        # transformer_impl came with 0.14; before, the layer spec alone says it
        config = kind(**{name: value for name, value in values.items() if name in known})
    except UsageError:
        raise
    except (AssertionError, ValueError) as error:
        raise UsageError(f"megatron-core rejects this model: {error}", remedy="Change the flags.") from error
    config.attention_flags = AttentionFlags.from_args(flags)  # for the adaptor of core attention; no field
    if "window_attn_skip_freq" not in known:  # before 0.15, for the same
        config.layers_with_window = flags.window_attn_skip_freq
    if "offload_modules" not in known:  # nor these before 0.16, for the adaptor of activation_offloading
        config.offload_modules = flags.offload_modules
        config.min_offloaded_tensor_size = flags.min_offloaded_tensor_size
    return config


def gpt(flags: ModelFlags, config: TransformerConfig, stage: int | None, first: bool, last: bool) -> GPTModel:
    """Build one chunk of the model, on the host or the device depending on ``--use-cpu-initialization``.

    Args:
        stage: the number of the interleaved chunk; None without interleaving.
        first, last: whether the chunk contains the embedding, and whether it contains the output layer.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_npu.pretrain.model import attention_bias, rotary

    layers = _layers(flags, config, stage)
    if flags.add_attention_bias:
        attention_bias.add(layers)
    positions, scaled = flags.position_embedding_type, flags.use_rope_scaling
    result = GPTModel(
        config,
        layers,
        vocab_size=flags.padded_vocab_size,
        max_sequence_length=flags.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not flags.untie_embeddings_and_output_weights,
        position_embedding_type="rope" if positions == "yarn" else positions,
        rotary_percent=flags.rotary_percent,
        rotary_base=flags.rotary_base,
        seq_len_interpolation_factor=flags.rotary_seq_len_interpolation_factor,
        rope_scaling=scaled and rotary.is_of_core(flags),
        rope_scaling_factor=flags.rope_scaling_factor,
        mtp_block_spec=_predicting_layers(flags, config, layers, stage),
        **_stage(stage),
    )
    rotary.scale(flags, result)
    _number_routers(config, result)
    return result


def _number_routers(config: TransformerConfig, model: GPTModel) -> None:
    """Number the routers of multi-token prediction layers after the routers of all other layers.

    Up to megatron-core 0.16, their numbers start at 1, so that their losses would be added to those of the
    first layers.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    for layer in getattr(getattr(model, "mtp", None), "layers", ()):
        for router in layer.modules():
            if isinstance(router, TopKRouter) and not hasattr(router, "is_mtp_layer"):
                router.layer_number = config.num_layers + layer.layer_number


def _layers(flags: ModelFlags, config: TransformerConfig, stage: int | None) -> Any:
    """Return megatron-core's local layer spec for a model chunk, as one spec or as one spec per layer."""
    from megatron.core.models.gpt import gpt_layer_specs

    if flags.num_experts is None:
        return gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=flags.normalization,
            qk_layernorm=flags.qk_layernorm,
            multi_latent_attention=flags.multi_latent_attention,
        )
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=flags.normalization, **_stage(stage)
    )
    if flags.moe_shared_expert_gate and not hasattr(config, "moe_shared_expert_gate"):
        # 0.16 has a field for it; before, the specification says False itself
        for layer in block.layer_specs:
            shared = getattr(layer.submodules.mlp.submodules, "shared_experts", None)
            if shared is not None:
                shared.params = {**shared.params, "gate": True}
    return block


def _predicting_layers(flags: ModelFlags, config: TransformerConfig, layers: Any, stage: int | None) -> Any:
    """Return the spec of the multi-token prediction layers in the chunk, or None if it has no such layers.

    Args:
        layers: the result of ``_layers``; the prediction layers are like the last of these.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    if flags.mtp_num_layers is None:
        return None
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=False, **_stage(stage)
    )


def _stage_is_passed() -> bool:
    """Return True if model chunks receive the number of their virtual stage as an argument.

    megatron-core 0.12 uses a global variable.
    """
    from megatron.core import parallel_state

    return "vp_stage" in inspect.signature(parallel_state.is_pipeline_first_stage).parameters


def _stage(stage: int | None) -> dict[str, int | None]:
    return {"vp_stage": stage} if _stage_is_passed() else {}


def mean_stage(stage: int | None) -> None:
    """Set megatron-core 0.12's global variable for the interleaved chunk's number inside the ``with``
    block.
    """
    from megatron.core import parallel_state

    if stage is not None and not _stage_is_passed():
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)


def at_ends(stage: int | None = None) -> tuple[bool, bool]:
    """Return whether this process holds the model's first chunk, and whether it holds the last one.

    Args:
        stage: number of the interleaved chunk; None without interleaving.
    """
    from megatron.core import parallel_state

    chunk = {"ignore_virtual": stage is None, **_stage(stage)}
    first = parallel_state.is_pipeline_first_stage(**chunk)
    return first, parallel_state.is_pipeline_last_stage(**chunk)


def on_device(flags: Flags, config: TransformerConfig, module: torch.nn.Module) -> torch.nn.Module:
    """Move a module to the device and, if the flags request it, to half precision with fp32 outputs."""
    from megatron.core.transformer.module import Float16Module

    module = module.to(devices.current().torch_device())
    return Float16Module(config, module) if flags.fp16 or flags.bf16 else module


def build(flags: Flags, config: TransformerConfig) -> list[DistributedDataParallel]:
    """Build on the device the chunks of the model that belong to this process.

    Without interleaving, there is one chunk.
    """
    stages, model, chunks = flags.virtual_pipeline_model_parallel_size, ModelFlags.of(flags), []
    for stage in range(stages) if stages else [None]:
        mean_stage(stage)
        chunks.append(wrapped(flags, config, gpt(model, config, stage, *at_ends(stage)), stage))
    return chunks


def wrapped(
    flags: Flags, config: TransformerConfig, module: torch.nn.Module, stage: int | None = None
) -> DistributedDataParallel:
    """Return a model chunk on the device, in the selected precision and inside a data-parallel wrapper.

    Args:
        stage: number of the interleaved chunk; None without interleaving.
    """
    from megatron.core import tensor_parallel

    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return data_parallel.wrap(flags, config, on_device(flags, config, module), stage)


def optimizer(flags: Flags, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Return megatron-core's optimizer with main weights, loss scaling, gradient clipping and
    weight-decay groups.
    """
    from megatron.core import optimizer as upstreams
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if flags.swap_optimizer:
        memory_flags.refuse_foreign_adam(upstreams.Adam, FusedAdam)
    FusedAdam.swap_moments = flags.swap_optimizer
    values = of_the_same_name(OptimizerConfig, flags) | {"params_dtype": dtype(flags)}
    values |= {f"{what}_dtype": _TYPES[getattr(flags, f"{what}_dtype")] for what in memory_flags.NARROW}
    make = get_megatron_optimizer
    if flags.optimizer == "muon" and hasattr(OptimizerConfig, "muon_use_nesterov"):  # until 0.17
        from megatron.core.optimizer import muon

        make = muon.get_megatron_muon_optimizer
        values["muon_use_nesterov"] = flags.muon_nesterov
    result = make(OptimizerConfig(**values), model)
    for part in getattr(result, "chained_optimizers", [result]):
        # before the first update there are no moments, and a checkpoint without them cannot be loaded
        if part.init_state_fn is not None:  # an offloaded one makes them itself
            part.init_state_fn(part.optimizer, part.config)
    return result


def schedule(flags: ScheduleFlags, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the schedule of the learning rate and the weight decay, counted in samples as in Megatron."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    total, decay, warmup, last_part = flags.in_samples()
    return OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.start_weight_decay,
        end_wd=flags.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=flags.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=flags.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=flags.override_opt_param_scheduler,
        wsd_decay_steps=last_part,
        lr_wsd_decay_style=flags.lr_wsd_decay_style,
    )


def unwrap(chunk: Any) -> Any:
    """Return the GPTModel inside its wrappers for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def connect(
    plan: RunPlan,
    config: TransformerConfig,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
) -> None:
    """Set in the model's configuration how the pipeline schedules scale, reduce and finalize gradients."""
    from megatron.core.distributed import finalize_model_grads

    def each(method: str) -> Any:
        functions = [getattr(chunk, method) for chunk in model]
        return functions if len(functions) > 1 else functions[0]

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if plan.overlap_grad_reduce:
        config.no_sync_func = each("no_sync")
        config.grad_sync_func = each("start_grad_sync")
    if plan.overlap_param_gather and len(model) > 1:
        config.param_sync_func = each("start_param_sync")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameter counts of the whole model, in which each weight is counted once.

    Attributes:
        total: the number of all weights.
        without_embeddings: the number of weights of the layers and the last norm.
        active: the number of weights used per token; of the experts, this includes ``--moe-router-topk`` per
            layer.
    """

    total: int
    without_embeddings: int
    active: int


def count(flags: ExpertFlags, model: list[DistributedDataParallel]) -> Parameters:
    """Count the parameters of the whole model, including the padding of the vocabulary.

    A collective: all ranks must call it. Each rank counts its share in the same way as megatron-core's
    gradient norm: the last stage's copy of a tied embedding is not counted, and replicated weights are
    counted only on the first tensor-parallel rank. Experts are counted over their own ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    own, of_experts = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for chunk in map(unwrap, model):
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                of_experts += parameter.numel() * _counts_of_expert(parameter)
            elif param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                in_body = name.startswith(("decoder.", "mtp."))
                own += torch.tensor([parameter.numel(), parameter.numel() * in_body])
    device = devices.current().torch_device()
    dense, experts = own.to(device), of_experts.to(device)
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    total, body = (dense + experts).tolist()
    idle = int(experts) * (many - flags.moe_router_topk) // many if (many := flags.num_experts) else 0
    return Parameters(total, body, total - idle)


def _counts_of_expert(parameter: torch.nn.Parameter) -> bool:
    """Return True if this rank counts an expert's weight, of which several ranks may have a copy."""
    from megatron.core import parallel_state

    is_part = getattr(parameter, "tensor_model_parallel", False)
    return is_part or parallel_state.get_expert_tensor_parallel_rank() == 0
