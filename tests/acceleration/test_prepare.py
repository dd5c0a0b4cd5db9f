"""Stacks of switches against a plain loop of torch, in one process."""

from __future__ import annotations

import torch

from megatron_npu.acceleration.prepare import prepare
from megatron_npu.switches import Switches
from tests.acceleration import models

CPU = torch.device("cpu")
STEPS, MICRO_BATCHES, BATCH = 20, 2, 4


def data() -> list[list[dict[str, torch.Tensor]]]:
    torch.manual_seed(1)
    return [[models.bert_batch(BATCH) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)]


def plain() -> list[float]:
    """Train as torch's tutorials do."""
    torch.manual_seed(0)
    model = models.bert()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    losses = []
    for micro_batches in data():
        total = 0.0
        for batch in micro_batches:
            loss = model(**batch).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def ours(switches: Switches) -> list[float]:
    torch.manual_seed(0)
    prepared = prepare(
        models.bert(),
        None,
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS),
        switches,
        device=CPU,
        lr=1e-3,
        weight_decay=0.1,
        clip_grad=0.5,
    )
    losses = []
    for micro_batches in data():
        total = 0.0
        for number, batch in enumerate(micro_batches, 1):
            with prepared.accumulating(last=number == MICRO_BATCHES):
                with prepared.forward_context():
                    loss = prepared.model(**batch).loss / MICRO_BATCHES
                prepared.backward(loss)
            total += loss.item()
        prepared.step()
        losses.append(total)
    return losses


def test_no_switch_is_the_plain_loop():
    torch.testing.assert_close(ours(Switches()), plain(), rtol=1e-5, atol=0)


def test_bf16_and_fp16():
    expected = plain()
    torch.testing.assert_close(ours(Switches(mixed_precision="bf16")), expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(ours(Switches(mixed_precision="fp16")), expected, rtol=1e-2, atol=0)
