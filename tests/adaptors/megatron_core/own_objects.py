"""What ms-swift does with megatron.training: its configuration is an object, its command line is another one.

It knows nothing of this project. Usage: ``own_objects.py FOLDER``, in two processes of torchrun, with a
tree of Megatron-LM on the path; with ``LATE=1`` the plug-in is imported behind Megatron.
"""

from __future__ import annotations

import os
import sys

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import set_global_variables
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer, train_step

if os.environ.get("LATE") == "1":
    assert "megatron_npu" not in sys.modules
    import megatron_npu  # noqa: F401  arms the hook and patches what has been imported

LENGTH, STEPS = 16, 3
OPTIONS = {
    **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH},
    **{"max_position_embeddings": LENGTH, "micro_batch_size": 2, "global_batch_size": 4},
    **{"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True},
    **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "lr": 1e-2, "lr_decay_style": "constant"},
    **{"train_iters": 2 * STEPS, "tokenizer_type": "NullTokenizer", "vocab_size": 64},
    **{"use_distributed_optimizer": True, "overlap_grad_reduce": True, "mock_data": True},
    **{"ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": True, "log_interval": 1},
}


def provider(pre_process=True, post_process=True, **_):
    """Return the model as ms-swift makes it, whatever Megatron's builders offer."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
    )


def batches(first):
    rank = torch.distributed.get_rank()
    for number in range(first, first + STEPS):
        start = torch.tensor([number + 3 * rank, number + 9 * rank])[:, None]
        yield (torch.arange(LENGTH + 1) + start).remainder(64).cuda()


def forward_step(iterator, model):
    tokens = next(iterator)
    positions = torch.arange(LENGTH).repeat(len(tokens), 1).cuda()
    hidden = torch.ones(1, 1, LENGTH, LENGTH).tril().lt(0.5).cuda()
    output = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])

    def loss(output):
        total = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def losses_of(parts, first):
    """Train some steps; return their losses."""
    config = get_model_config(parts[0][0])
    config.finalize_model_grads_func = finalize_model_grads
    run, data, losses = get_forward_backward_func(), RerunDataIterator(batches(first)), []
    for number in range(STEPS):
        found = train_step(forward_step, data, *parts, config, run, iteration=number)
        losses.append(found[0]["lm loss"].item())
    return losses


def built():
    return setup_model_and_optimizer(model_type=ModelType.encoder_or_decoder, model_provider_func=provider)


def main(folder):
    args = parse_args(
        ignore_unknown_args=True
    )  # of the command line, which has other words, nothing is taken
    vars(args).update(OPTIONS, save=folder, save_interval=STEPS)
    validate_args(args)
    set_global_variables(args)
    initialize_megatron()
    parts = built()
    losses = losses_of(parts, 0)
    assert losses[-1] < losses[0], losses
    save_checkpoint(STEPS, *parts, 0)
    get_args().load = folder
    assert losses_of(built(), STEPS) == losses_of(parts, STEPS)
    if torch.distributed.get_rank() == 0:
        print("goes on bit for bit after", losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
