"""Wrong numbers of upstream that public reports tell of, in its own functions; backports_worker.py calls it.

Rank 1 of 4 processes that are not there: TP 2. What the collectives would bring is like the own part.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

PREDICTION = "megatron.core.transformer.multi_token_prediction"
WHOLE = [-3.0, 0.0, -3.0, 0.0]  # logits: both ranks' parts are alike, and the label's adds nothing


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Let every sum over two ranks be of two that are alike."""

    def twice(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **_: Any) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(2)

    kept, dist.all_reduce = dist.all_reduce, twice
    try:
        yield
    finally:
        dist.all_reduce = kept


def gathered_logits() -> list[float]:
    """Return a loss that is given the whole row, and the gradient of the label's logit."""
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule

    config = SimpleNamespace(cross_entropy_loss_fusion=False)
    tp = parallel_state.get_tensor_model_parallel_group()
    model = SimpleNamespace(config=config, vocab_size=4, tp_group=tp, pg_collection=SimpleNamespace(tp=tp))
    logits = torch.tensor([[WHOLE]], requires_grad=True)
    with alike():
        loss = LanguageModule.compute_language_model_loss(model, torch.tensor([[3]]), logits * 1)
        loss.sum().backward()
    return [round(loss.item(), 4), round(logits.grad[0, 0, 3].item(), 4)]


def smoothed_loss() -> float:
    """Return a loss with label smoothing, of this rank's part of the row."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    part = torch.tensor([[WHOLE[2:]]])
    with alike():
        return round(vocab_parallel_cross_entropy(part, torch.tensor([[3]]), 0.1).item(), 4)


def offset_counts() -> bool | None:
    """Return whether the norm counts this rank's offsets of a learnable softmax."""
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "softmax_type" not in TransformerConfig.__dataclass_fields__:
        return None
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        softmax_type="learnable",
        use_cpu_initialization=True,
    )
    made = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    return bool(param_is_not_tensor_parallel_duplicate(made.softmax_offset))


# --- multi-token prediction ------------------------------------------------------------------------------

MASKS = ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0])  # of two micro-batches, whose losses a token are 1 and 3


class Further(torch.nn.Module):
    """A model whose further token has its micro-batch's loss times the weight."""

    def __init__(self) -> None:
        super().__init__()
        from megatron.core.enums import ModelType
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.weight = torch.nn.Parameter(torch.ones(()))
        self.model_type = ModelType.encoder_or_decoder
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            mtp_num_layers=1,
            mtp_loss_scaling_factor=1.0,
            calculate_per_token_loss=True,
        )

    def set_input_tensor(self, _: Any) -> None:
        """Take nothing: there is one stage."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        from megatron.core import parallel_state

        process = importlib.import_module(PREDICTION).process_mtp_loss
        tp = {"tp_group": parallel_state.get_tensor_model_parallel_group()}
        return process(
            hidden_states=self.weight * torch.ones(8, 1, 1),
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            output_layer=lambda hidden, **_: (hidden, None),
            output_weight=None,
            runtime_gather_output=None,
            is_training=True,
            compute_language_model_loss=lambda labels, logits: labels * logits[..., 0].t(),
            config=self.config,
            **{name: tp[name] for name in tp if name in inspect.signature(process).parameters},
        )


def further_gradient() -> float | None:
    """Return the gradient of a further token's loss, of a global batch of two unlike micro-batches."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    module = importlib.import_module(PREDICTION)
    if not hasattr(module, "process_mtp_loss"):  # until 0.16 it is inside of the model
        return None
    module.MTPLossLoggingHelper.tracker.clear()
    model = Further()
    batches = [
        {"labels": torch.full((1, 4), loss), "loss_mask": torch.tensor([mask])}
        for loss, mask in zip((1, 3), MASKS, strict=True)
    ]

    def step(data: Iterator[dict[str, torch.Tensor]], model: Further) -> tuple[torch.Tensor, Any]:
        batch = next(data)
        tokens = batch["loss_mask"].sum().int()
        return model(batch), lambda output: (output.sum() * 0, tokens, {})

    forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=2,
        seq_length=4,
        micro_batch_size=1,
    )
    module.MTPLossLoggingHelper.tracker.clear()
    return round(model.weight.grad.item() / sum(map(sum, MASKS)), 4)


def further_logged() -> float:
    """Return the loss of a further token in the log, of the same two micro-batches."""
    module = importlib.import_module(PREDICTION)
    helper = module.MTPLossLoggingHelper
    helper.tracker.clear()
    save = getattr(helper, "save_loss_to_tracker", None) or helper.save_metrics_to_tracker
    beside = [torch.zeros(()), torch.zeros(())] if hasattr(helper, "save_metrics_to_tracker") else []
    for loss, mask in zip((1.0, 3.0), MASKS, strict=True):
        rolled, tokens = module.roll_tensor(torch.tensor([mask]), shifts=-1, dims=-1)
        save((rolled * loss).sum() / tokens, *beside, 0, 1)
    logged: dict[str, torch.Tensor] = {}
    helper.track_mtp_metrics(1 / 2, 1, None, total_loss_dict=logged)
    helper.tracker.clear()
    return round(logged["mtp_1 loss"].item(), 4)


# --- a tensor-parallel group of the module's own ---------------------------------------------------------


class Anything(torch.nn.Module):
    """A layer of any arguments, which it keeps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs, self.weight = kwargs, torch.nn.Parameter(torch.ones(2))


def own_groups() -> Any:
    """Return groups in which this is the first tensor-parallel rank; globally it is the second."""
    return SimpleNamespace(tp=dist.new_group([1, 3]), cp=dist.new_group([1]))


def recompute_group() -> bool | None:
    """Return whether a further layer's recomputation is in the layer's own group."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    if not hasattr(importlib.import_module(PREDICTION), "process_mtp_loss"):
        return None  # it has no group of its own
    config = SimpleNamespace(
        fp8="e4m3",
        fp8_recipe="tensorwise",
        distribute_saved_activations=True,
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    groups, seen = own_groups(), []
    layer = SimpleNamespace(config=config, tp_group=groups.tp)
    kept = getattr(transformer_engine, "te_checkpoint", None)
    transformer_engine.te_checkpoint = lambda function, distribute, tracker, group, *_, **__: seen.append(
        group
    )
    try:
        MultiTokenPredictionLayer._checkpointed_forward(layer, lambda: None, torch.ones(1))
    finally:
        transformer_engine.te_checkpoint = kept
    return seen[0] is groups.tp


def padding_of_rank() -> list[bool] | None:
    """Return the part of a padding mask that this rank's experts get, of one whose first half is padding."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    preprocess = getattr(GPTModel, "_preprocess", None)
    if preprocess is None or "padding_mask" not in inspect.signature(preprocess).parameters:
        return None
    model = SimpleNamespace(
        training=True,
        pre_process=True,
        config=SimpleNamespace(sequence_parallel=True, multi_latent_attention=False, flash_decode=False),
        embedding=_Embedding(),
        position_embedding_type="none",
        pg_collection=own_groups(),
        mtp_process=False,
    )
    mask = torch.tensor([[True, True, False, False]])
    ids = torch.zeros(1, 4, dtype=torch.long)
    found = preprocess(model, ids, ids, padding_mask=mask)
    return next(part for part in found if getattr(part, "dtype", None) is torch.bool)[0].tolist()


class _Embedding:
    scatter_to_sequence_parallel = True

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, 1, 8)


def embeddings_of_rank() -> list[float] | None:
    """Return the part of a sequence 0, 1, 2, 3 that this rank of a LLaVAModel gets."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    if not {"pg_collection", "model_comm_pgs"} & set(inspect.signature(LLaVAModel.__init__).parameters):
        return None
    groups = own_groups()
    model = SimpleNamespace(
        pre_process=True,
        post_process=False,
        context_parallel_lm=1,
        sequence_parallel_lm=True,
        shared_embedding_or_mtp=False,
        tp_comm_overlap_lm=False,
        tensor_model_parallel_size_lm=2,
        pg_collection=groups,
        model_comm_pgs=groups,
    )
    sequence = torch.arange(4.0)[:, None, None]
    found, *_ = LLaVAModel._process_embedding_token_parallel(model, sequence, None, None, None)
    return found.flatten().tolist()


def projection_group() -> bool | None:
    """Return whether queries, keys and values of a CrossAttention are made in its own group."""
    from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = inspect.signature(CrossAttention.__init__).parameters
    named = next((name for name in ("pg_collection", "model_comm_pgs") if name in known), None)
    if named is None:
        return None
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    layers = CrossAttentionSubmodules(Anything, Anything, Anything, Anything)
    groups = own_groups()
    made = CrossAttention(config, layers, 1, AttnMaskType.padding, **{named: groups})
    return all(layer.kwargs.get("tp_group") is groups.tp for layer in (made.linear_q, made.linear_kv))


# --- other parts -----------------------------------------------------------------------------------------


def output_norm_gradient() -> float | None:
    """Return the gradient of a gated delta net's norm, where both ranks' heads give it one."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    for name in ("gated_delta_net.gdn", "gated_delta_net"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(f"megatron.core.ssm.{name}")
            break
    else:
        return None
    for holder in (module, sys.modules.get("megatron.core.ssm.gated_delta_net.common")):
        if holder is not None:  # as if FLA were there, of which nothing is called here
            vars(holder).update({"HAVE_FLA": True, "chunk_gated_delta_rule": print})
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        linear_conv_kernel_dim=2,
        linear_key_head_dim=2,
        linear_value_head_dim=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        activation_func=torch.nn.functional.silu,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    layers = SimpleNamespace(in_proj=Anything, out_norm=Anything, out_proj=Anything)
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    made = module.GatedDeltaNet(config, layers, layer_number=1, pg_collection=groups)
    with alike():
        made.out_norm.weight.sum().backward()
    return made.out_norm.weight.grad[0].item()


def names_of_second_stage() -> list[str] | None:
    """Return how Megatron's FSDP names the two layers of a second stage in a checkpoint: model, optimizer."""
    if not hasattr(typing, "override"):  # of Python 3.12; 0.18 and 0.19 take it
        typing.override = lambda function: function
    try:
        checkpointing = importlib.import_module("megatron.training.checkpointing")
    except ImportError:
        return None
    preprocess = getattr(checkpointing, "preprocess_fsdp_dtensor_state_dict", None)
    if preprocess is None:
        return None
    block = torch.nn.Module()
    block.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    for number, layer in enumerate(block.layers, 3):  # as upstream counts, from 1 on
        layer.layer_number = number
    model = torch.nn.Module()
    model.decoder = block
    names = [f"decoder.layers.{number}.weight" for number in range(2)]
    state = {
        "model": {f"module.{name}": torch.ones(1) for name in names},
        "optimizer": {"state": {f"module.{name}": {"exp_avg": torch.ones(1)} for name in names}},
    }
    found = preprocess(SimpleNamespace(swiglu=False, num_experts=None), state, model)
    return [name for part in (found["model"], found["optimizer"]["state"]) for name in part]


def counted_places() -> list[int]:
    """Return how many places of 4 count: in a first sample with 2 padded ones, and in two without."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    tokenizer = SimpleNamespace(eod=9)
    more = [None] * ("document_lengths" in inspect.getsource(sys.modules[GPTDataset.__module__]))  # 0.19
    data = SimpleNamespace(
        config=SimpleNamespace(
            add_extra_token_to_sequence=True,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            inter_document_masking=False,
        ),
        _pad_token_id=8,
        masks_and_position_ids_are_cacheable=True,
        masks_and_position_ids_are_cached=False,
        cached_attention_mask=None,
        cached_loss_mask=None,
        cached_position_ids=None,
        _query_document_sample_shuffle_indices=lambda index: (
            np.array([1, 2, 3, 8, 8] if index == 0 else [1, 2, 3, 4, 5]),
            None,
            *more,
        ),
    )
    return [int(GPTDataset.__getitem__(data, index)["loss_mask"].sum()) for index in range(3)]


def splits() -> list[Any]:
    """Return how --split is read: with an exponent, with a sign, and with what is no number."""
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    found: list[Any] = []
    for text in ("1e3,1000,0", "-1,1,0", "nan,1,0", "90;10;0"):
        try:
            found.append([round(share, 4) for share in parse_and_normalize_split(text)])
        except Exception as error:
            found.append(type(error).__name__)
    return found


def factors_of_a_script() -> list[float]:
    """Return by what a GPT of a script divides positions, and its slowest wave, that were to be 2 and 32."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    for other in ("bert.bert_model", "T5.t5_model", "mamba.mamba_model"):  # hybrid.hybrid_model by the last
        importlib.import_module(f"megatron.core.models.{other}")
    name = "megatron.training.global_vars"
    args = SimpleNamespace(rotary_seq_len_interpolation_factor=2, rope_scaling_factor=32.0)
    before = sys.modules.get(name)
    sys.modules[name] = SimpleNamespace(_GLOBAL_ARGS=args)
    try:
        model = GPTModel(
            config=TransformerConfig(
                num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
            ),
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=8,
            max_sequence_length=8,
            position_embedding_type="rope",
            rotary_base=500_000,
            rope_scaling=True,
        )
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
    rotary = model.rotary_pos_emb
    slowest = float(rotary.inv_freq[-1]) * 500_000 ** (6 / 8)
    return [rotary.seq_len_interpolation_factor or 1, round(1 / slowest, 3)]


def everything() -> dict[str, Any]:
    """Return what the numbers are."""
    return {
        "gathered logits": gathered_logits(),
        "smoothed loss": smoothed_loss(),
        "offset counts": offset_counts(),
        "further gradient": further_gradient(),
        "further logged": further_logged(),
        "recompute group": recompute_group(),
        "padding of rank": padding_of_rank(),
        "embeddings of rank": embeddings_of_rank(),
        "projection group": projection_group(),
        "output norm": output_norm_gradient(),
        "second stage": names_of_second_stage(),
        "counted places": counted_places(),
        "splits": splits(),
        "factors of a script": factors_of_a_script(),
    }
