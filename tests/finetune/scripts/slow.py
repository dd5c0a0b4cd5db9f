"""A training that takes longer than any test waits; it says which iteration it is in."""

from __future__ import annotations

import time

import torch

from rapidformer import Finetuner, RapidformerEngine


class Slow(Finetuner):
    def train_valid_test_datasets_provider(self):
        return [torch.ones(1)] * 8, None, None, None

    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(1, 1), None, None

    def run_forward_step(self, batch, model):
        time.sleep(0.05)
        return model(batch).mean()


Slow(RapidformerEngine()).train()
