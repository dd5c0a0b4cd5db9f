"""A run of a tiny model in plain torch or prepared by switches, with the same data and weights."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from megatron_npu.finetune.model.lora import adapt
from megatron_npu.finetune.model.prepare import AdamOptions, Prepared, prepare
from megatron_npu.options.switches import Switches
from tests.support.finetune_models import KINDS, Batch

MICRO_BATCHES, BATCH = 4, 2  # of a step, all ranks together
LR, DECAY, CLIP = 3e-3, 0.1, 0.5


def data(kind: str, steps: int) -> list[list[Batch]]:
    """Return the micro-batches of each step; every other step uses the same ones, which can be learned."""
    torch.manual_seed(1)
    two = [[KINDS[kind].batch(BATCH) for _ in range(MICRO_BATCHES)] for _ in range(2)]
    return [two[step % 2] for step in range(steps)]


def fresh(kind: str) -> nn.Module:
    """Return the model with the initial weights of every run, and seed LoRA's and dropout's numbers."""
    torch.manual_seed(0)
    model = KINDS[kind].model()
    torch.manual_seed(2)
    return model.train()


def torchs_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own AdamW for a model, created as in a user's script."""
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim <= 1 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR)


def plain(kind: str, steps: int, lora_rank: int = 0) -> list[float]:
    """Train with torch (and peft) alone, in one process; return the loss of each step."""
    model = fresh(kind)
    if lora_rank:
        model, _ = adapt(model, lora_rank)
    optimizer = torchs_adamw(model)
    scheduler = LinearLR(optimizer, total_iters=steps)
    losses = []
    for micro_batches in data(kind, steps):
        total = 0.0
        for batch in micro_batches:
            loss = model(**batch)["loss"] / len(micro_batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def prepared(
    kind: str, switches: Switches, steps: int, device: torch.device, ready: bool = False
) -> Prepared:
    """Return the model as ``plain`` trains it, but prepared; ``ready``: with an optimizer of the user's."""
    model = fresh(kind)
    return prepare(
        model,
        torchs_adamw(model) if ready else None,
        partial(LinearLR, total_iters=steps),
        switches,
        device=device,
        adam=AdamOptions(lr=LR, weight_decay=DECAY),
        clip_grad=CLIP,
    )


def train(made: Prepared, micro_batches: list[list[Batch]], device: torch.device) -> list[float]:
    """Train on this rank's share of the micro-batches; return the loss of each step over all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in micro_batches:
        mine = step[rank::ranks]
        total = torch.zeros((), device=device)
        for number, batch in enumerate(mine, 1):
            batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
            with made.accumulating(last=number == len(mine)):
                with made.forward_context():
                    loss = made.model(**batch)["loss"] / len(mine)
                made.backward(loss)
            total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
        made.step()
    return losses


def run(kind: str, switches: Switches, steps: int, device: torch.device, ready: bool = False) -> list[float]:
    """Prepare and train; return the loss of each step over all ranks. No wrapper requests logits."""
    from megatron_npu.ops.swapping import heads

    micro_batches = data(kind, steps)
    made = prepared(kind, switches, steps, device, ready)
    losses = train(made, micro_batches, device)
    left = [heads.calls_left[part] for part in made.module.modules() if part in heads.calls_left]
    assert not left, left
    return losses


def resumed(
    kind: str, first: Switches, then: Switches, steps: int, device: torch.device, folder: str
) -> list[float]:
    """Train half of the steps, save, and train the rest with other switches in a new model."""
    import torch.distributed.checkpoint as dcp

    micro_batches, half = data(kind, steps), steps // 2
    made = prepared(kind, first, steps, device)
    losses = train(made, micro_batches[:half], device)
    dcp.save(made.state_dict(), checkpoint_id=folder)
    made = prepared(kind, then, steps, device)
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.add_(1.0)  # whatever it starts from is read anew
    state = made.state_dict()
    dcp.load(state, checkpoint_id=folder)
    made.load_state_dict(state)
    return losses + train(made, micro_batches[half:], device)
