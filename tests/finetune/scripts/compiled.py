"""A user's own model with something that graphs fuse."""

from __future__ import annotations

import torch

from rapidformer import Finetuner, RapidformerEngine


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return (self.layer(x).sigmoid() * x + 1.0).square().mean()


class Compiled(Finetuner):
    def train_valid_test_datasets_provider(self):
        return [torch.ones(8)] * 16, None, None, None

    def model_optimizer_lr_scheduler_provider(self):
        return Model(), None, None

    def run_forward_step(self, batch, model):
        return model(batch)


Compiled(RapidformerEngine()).train()
