"""A program of one's own on megatron-core: optimizer, schedule, a sharded checkpoint; every call by keywords.

It knows nothing of this project. Usage: ``own_program.py FOLDER``, in the processes of torchrun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, TOKENS, STEPS = 16, 64, 3
LAYOUT = {"distrib_optim_sharding_type": "fully_reshardable"}


class Training:
    """A model, its optimizer and its schedule."""

    def __init__(self, seed):
        model_parallel_cuda_manual_seed(seed=seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            finalize_model_grads_func=finalize_model_grads,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=TOKENS,
            max_sequence_length=LENGTH,
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
        self.model = DistributedDataParallel(config=config, ddp_config=ddp, module=model.cuda())
        assert self.model.to(device=torch.device("cuda")) is self.model
        assert self.model.cuda() is self.model
        options = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(config=options, model_chunks=[self.model])
        self.scheduler = OptimizerParamScheduler(
            optimizer=self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=1,
            lr_decay_steps=2 * STEPS,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.01,
            wd_incr_steps=2 * STEPS,
            wd_incr_style="constant",
        )

    def step(self, number):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        (reduced,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([number]),
            model=[self.model],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=1)
        return reduced["loss"].item()

    def state(self, is_loading=False):
        of_model = self.model.module.sharded_state_dict(prefix="model.", metadata=LAYOUT)
        of_optimizer = self.optimizer.sharded_state_dict(
            model_sharded_state_dict=of_model, is_loading=is_loading, metadata=LAYOUT
        )
        return {**of_model, "optimizer": of_optimizer, "scheduler": self.scheduler.state_dict()}

    def save(self, folder):
        dist_checkpointing.save(
            sharded_state_dict=self.state(), checkpoint_dir=folder, content_metadata=LAYOUT
        )

    def load(self, folder):
        state = dist_checkpointing.load(sharded_state_dict=self.state(is_loading=True), checkpoint_dir=folder)
        self.optimizer.load_state_dict(state_dict=state.pop("optimizer"))
        self.scheduler.load_state_dict(state_dict=state.pop("scheduler"))
        of_model = [name for name in state if name.startswith("model.")]
        weights = {name.removeprefix("model."): state[name] for name in of_model}
        self.model.module.load_state_dict(state_dict=weights)


def forward_step(data_iterator, model):
    start = next(data_iterator) + 7 * parallel_state.get_data_parallel_rank()
    tokens = (torch.arange(LENGTH + 1).repeat(2, 1) + start).remainder(TOKENS).cuda()
    output = model(
        input_ids=tokens[:, :-1],
        position_ids=torch.arange(LENGTH).repeat(2, 1).cuda(),
        attention_mask=torch.ones(1, 1, LENGTH, LENGTH).tril().lt(0.5).cuda(),
        labels=tokens[:, 1:],
    )
    return output, reduce_loss


def reduce_loss(output_tensor):
    loss = output_tensor.mean()
    return loss, {"loss": loss.detach()}


def main(folder):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend="nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    first = Training(seed=1)
    losses = [first.step(number) for number in range(STEPS)]
    assert losses[-1] < losses[0], losses
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    first.save(folder)
    second = Training(seed=2)
    second.load(folder)
    for number in range(STEPS):
        assert second.step(number) == first.step(number)
    if torch.distributed.get_rank() == 0:
        print("goes on bit for bit after", losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
