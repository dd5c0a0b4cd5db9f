"""What verl's actor does with megatron-core: packed answers of a policy, their log-probabilities, a step.

Names are bound by value when this module is imported; the configuration is objects alone, and no argument of
a command line is read. It knows nothing of this project. Usage: ``own_policy.py FOLDER``, in two processes
of torchrun; with ``LATE=1`` the plug-in is imported behind Megatron.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig

if os.environ.get("LATE") == "1":
    assert "megatron_npu" not in sys.modules
    import megatron_npu  # noqa: F401  arms the hook and patches what has been imported

LENGTHS, TOKENS, STEPS = (9, 5, 10), 64, 4
LAYOUT = {"distrib_optim_sharding_type": "fully_reshardable"}


def make(seed):
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # of variable lengths upstream demands it
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=TOKENS,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp, module=model.cuda())
    options = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, use_distributed_optimizer=True)
    return wrapped, get_megatron_optimizer(config=options, model_chunks=[wrapped])


def answers():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(TOKENS, (length,), generator=generator).cuda() for length in LENGTHS]


def log_probabilities(model, rows):
    """Of every next token of the rows, which are one packed sequence for the model."""
    bounds = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0).to(torch.int32).cuda()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    tokens = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None].cuda()
    logits = model(tokens, positions, None, packed_seq_params=packed).float()
    labels = tokens.roll(-1, 1)
    return -vocab_parallel_cross_entropy(logits.transpose(0, 1), labels.transpose(0, 1)).flatten()


def step(model, optimizer, old):
    """One update of the policy: answers 0 and 2 are rewarded, the other one is not."""
    rows = answers()
    weights = torch.tensor([1.0, -1.0, 1.0]).repeat_interleave(torch.tensor(LENGTHS)).cuda()

    def forward(iterator, module):
        found = log_probabilities(module, next(iterator))
        ratio = (found - old).exp().clamp(max=1.2)
        return found, lambda output: ((loss := -(ratio * weights).mean()), {"loss": loss.detach()})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    (reduced,) = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([rows]),
        model=[model],
        num_microbatches=1,
        seq_length=sum(LENGTHS),
        micro_batch_size=1,
        forward_only=False,
    )
    done, norm, _ = optimizer.step()
    assert done
    assert norm > 0
    return reduced["loss"].item()


def state(model, optimizer, is_loading=False):
    of_model = model.module.sharded_state_dict(prefix="model.", metadata=LAYOUT)
    return {**of_model, "optimizer": optimizer.sharded_state_dict(of_model, is_loading, metadata=LAYOUT)}


def main(folder):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend="nccl")
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    model, optimizer = make(1)
    with torch.no_grad():
        old = log_probabilities(model, answers())
        each = torch.cat([log_probabilities(model, [padded(row)])[: len(row)] for row in answers()])
    inner = torch.ones(sum(LENGTHS), dtype=torch.bool)  # the last of a row is asked for the next row's first
    inner[torch.tensor(LENGTHS).cumsum(0) - 1] = False
    difference = (old - each)[inner.to(old.device)].abs().max().item()
    assert difference < 1e-5, difference
    losses = [step(model, optimizer, old) for _ in range(STEPS)]
    assert losses[-1] < losses[0], losses
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state(model, optimizer), folder, content_metadata=LAYOUT)
    second, its_optimizer = make(2)
    content = dist_checkpointing.load(state(second, its_optimizer, True), folder)
    its_optimizer.load_state_dict(content.pop("optimizer"))
    weights = {name.removeprefix("model."): value for name, value in content.items() if "model." in name[:6]}
    second.module.load_state_dict(weights)
    assert [step(second, its_optimizer, old) for _ in range(2)] == [
        step(model, optimizer, old) for _ in range(2)
    ]
    if torch.distributed.get_rank() == 0:
        print("goes on bit for bit after", losses)
    torch.distributed.destroy_process_group()


def padded(row):
    """Sequence parallelism wants as many tokens as its ranks divide."""
    return torch.cat([row, row.new_zeros(len(row) % 2)])


if __name__ == "__main__":
    main(sys.argv[1])
