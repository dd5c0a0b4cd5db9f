"""Layers of ours under TransformerEngine's names, against the local ones of the megatron-core on the path.

Run as a module with ``MEGATRON_NPU_TE=local``, in one process or in the two of a tensor-parallel group:

    python -m tests.adaptors.megatron_core.te_layers_worker FOLDER

One process compares the layers, and leaves a checkpoint and a gradient in FOLDER; two processes load it and
compare theirs.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

VOCABULARY, LENGTH, EXPERTS = 64, 16, 4
CASES: dict[str, dict[str, Any]] = {
    "plain": {"hidden_dropout": 0.1},
    "llama": {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
    "experts": {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    },
}
_NAMES = (  # of the local layers, and TransformerEngine's
    (r"input_layernorm\.", r"self_attention.linear_qkv.layer_norm_"),
    (r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc.)\.weight", r"mlp.experts.\2.weight\1"),
)
_DENSE = (r"pre_mlp_layernorm\.", r"mlp.linear_fc1.layer_norm_")


def model(case: str, named: bool, tensor_parallel: int = 1) -> Any:
    """Return a GPT of two layers, of TransformerEngine's names or of the local layers."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = "num_moe_experts" in CASES[case]
    config = TransformerConfig(
        **{
            **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0},
            **{"tensor_model_parallel_size": tensor_parallel, "sequence_parallel": tensor_parallel > 1},
            **{"hidden_dropout": 0.0, "bias_dropout_fusion": True, "moe_grouped_gemm": experts and named},
            **CASES[case],
        }
    )
    chosen = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    chosen["moe_grouped_gemm"] = config.moe_grouped_gemm
    if named:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**chosen)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(**chosen, normalization=config.normalization)
    torch.manual_seed(3)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope").cuda()


def disturb(built: Any) -> None:
    """Change norms and biases: while all their values are the same, a mistake among them cannot be seen."""
    for parameter in built.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)


def loss_and_gradients(built: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a fixed batch, and the gradients by the names of the parameters."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(11)  # of dropout
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH).mul(7).remainder(VOCABULARY).cuda()
    positions = torch.arange(LENGTH).expand(2, LENGTH).cuda()
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1).cuda()
    built.zero_grad()
    loss = built(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in built.named_parameters()}


def under_te_names(case: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return a local model's entries under TransformerEngine's names, without the states of fp8."""
    result = {}
    for name, value in entries.items():
        for local, named in (*_NAMES, *([] if "num_moe_experts" in CASES[case] else [_DENSE])):
            name = re.sub(local, named, name)
        if "_extra_state" not in name:
            result[name] = value
    return result


def compare(case: str) -> tuple[Any, Any]:
    """Demand the same loss and the same gradients, bit for bit, of both kinds of layers; return both."""
    named, local = model(case, True), model(case, False)
    disturb(local)
    named.load_state_dict(under_te_names(case, local.state_dict()))
    (loss, mine), (wanted, theirs) = loss_and_gradients(named), loss_and_gradients(local)
    assert torch.equal(loss, wanted), (case, loss, wanted)
    theirs = under_te_names(case, theirs)
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    unequal = {name for name in mine if not torch.equal(mine[name], theirs[name])}
    assert not unequal, (case, unequal)
    return named, local


def load_as_te_writes(built: Any) -> None:
    """Load what TransformerEngine writes: 1.x a stream or nothing, 2.x bytes, norms and attention, too."""
    for written in (
        None,
        torch.empty(0, dtype=torch.uint8),
        torch.ones(9, dtype=torch.uint8),
        io.BytesIO(b"x"),
    ):
        state = built.state_dict()
        state |= {name: written for name in state if name.endswith("linear_qkv._extra_state")}
        state["decoder.layers.0.self_attention.core_attention._extra_state"] = written
        state["decoder.final_layernorm._extra_state"] = written
        built.load_state_dict(state)  # strict


def cross_attention_takes_a_mask_of_each_side() -> None:
    """Demand the numbers of torch's attention for the rows that are no padding: T5 gives a pair of masks."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = TEDotProductAttention(config, 1, AttnMaskType.padding, "cross")
    query, key, value = (torch.randn(length, 2, 4, 8).cuda() for length in (5, 7, 7))
    lengths = torch.tensor([[5, 6], [3, 4]]).cuda()  # of queries and keys
    queries, keys = (
        (torch.arange(length, device=lengths.device) >= lengths[:, side, None])[:, None, None]
        for side, length in enumerate((5, 7))
    )
    found = attention(query, key, value, (queries, keys), attn_mask_type=AttnMaskType.padding)
    for sequence, (rows, seen) in enumerate(lengths.tolist()):
        parts = (query[:rows, sequence], key[:seen, sequence], value[:seen, sequence])
        whole = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts))
        torch.testing.assert_close(found[:rows, sequence], whole.transpose(0, 1).flatten(1))


def checkpoint(built: Any, folder: Path) -> None:
    """Save a sharded checkpoint of ours."""
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(sharded(built), str(folder))


def load(built: Any, folder: Path) -> Any:
    """Load one into a model of either kind of layers, and return it."""
    from megatron.core import dist_checkpointing

    built.load_state_dict(dist_checkpointing.load(sharded(built), str(folder)))
    return built


def sharded(built: Any) -> dict[str, Any]:
    """Return the model's description for a sharded checkpoint."""
    from megatron.core import parallel_state

    return built.sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    )


def alone(folder: Path) -> None:
    """Compare all in one process."""
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_npu.base.errors import UsageError

    assert ModelType.encoder_or_decoder != ModelType.encoder_and_decoder, "mbridge reads it"
    cross_attention_takes_a_mask_of_each_side()
    for case in CASES:
        built, _ = compare(case)
        load_as_te_writes(built)
        checkpoint(built, folder / case)
        loss, _ = loss_and_gradients(built)
        # Upstream describes local layers under TransformerEngine's names; the norm before experts wrongly.
        other = load(model(case, named=case == "experts"), folder / case)
        assert torch.equal(loss, loss_and_gradients(other)[0]), case
        again = folder / f"{case}, loaded"
        checkpoint(other, again)
        assert torch.equal(loss, loss_and_gradients(load(model(case, True), again))[0]), case
    if hasattr(TransformerConfig, "fused_residual_rmsnorm"):  # since 0.17
        CASES["residual"] = {**CASES["experts"], "normalization": "RMSNorm", "fused_residual_rmsnorm": True}
        compare("residual")
    _, gradients = loss_and_gradients(load(model("llama", True), folder / "llama"))
    torch.save(gradients, folder / "gradients.pt")
    with pytest.raises(UsageError, match="fp8"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, fp8="hybrid")


def on_a_simulated_npu(folder: Path) -> None:
    """Compare there, and demand no more launches than of the local layers."""
    from megatron_npu.sim import counting

    for case in CASES:
        launches = []
        for built in compare(case):
            with counting() as counts:
                loss_and_gradients(built)
            launches.append(counts.total_launches)
        named, local = launches
        print(case, named, local)
        assert named <= local, (case, named, local)


def together(folder: Path) -> None:
    """Load the checkpoint of one process in a tensor-parallel group, and compare with its gradients."""
    built = load(model("llama", True, tensor_parallel=dist.get_world_size()), folder / "llama")
    wanted = torch.load(folder / "gradients.pt")
    _, gradients = loss_and_gradients(built)
    for name, parameter in built.named_parameters():
        gradient, whole = gradients[name], wanted[name]
        if getattr(parameter, "sequence_parallel", False):  # finalize_model_grads sums these
            dist.all_reduce(gradient)
        if gradient.shape != whole.shape:
            axis = parameter.partition_dim
            parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, gradient.contiguous())
            # the two halves of a gated layer are cut one by one
            halves = 2 if name.endswith("linear_fc1.weight") else 1
            pieces = [part.chunk(halves, axis)[half] for half in range(halves) for part in parts]
            gradient = torch.cat(pieces, axis)
        torch.testing.assert_close(gradient, whole, rtol=2e-4, atol=2e-6, msg=f"another gradient of {name}")


def main(run: Callable[[Path], None]) -> None:
    """Run a comparison in the folder of the command line, and demand that all patches fit."""
    import megatron_npu

    megatron_npu.install()
    from megatron.core import parallel_state, tensor_parallel

    folder = Path(sys.argv[1])
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    run(folder)
    bad = [row for row in megatron_npu.ledger().rows if row.state in ("failed", "drifted")]
    assert not bad, bad
    dist.destroy_process_group()


if __name__ == "__main__":
    simulated = os.environ.get("MEGATRON_NPU_SIM") == "1"
    kind = on_a_simulated_npu if simulated else alone
    main(lambda folder: (kind if dist.get_world_size() == 1 else together)(folder))
