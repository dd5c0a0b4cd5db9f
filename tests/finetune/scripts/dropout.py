"""A user's own model with dropout, and data that draw random numbers; classes are told by a sum."""

from __future__ import annotations

import random

import numpy
import torch
from torch.nn.functional import cross_entropy

from rapidformer import Finetuner, RapidformerEngine


class Sums(Finetuner):
    def train_valid_test_datasets_provider(self):
        numbers = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
        samples = [{"x": row, "labels": (row.sum() > 0).long()} for row in numbers]

        def noisy(chosen):
            batch = torch.utils.data.default_collate(chosen)
            batch["x"] = batch["x"] + 0.1 * torch.randn_like(batch["x"]) + 0.01 * random.random()
            return batch

        return samples[:50], samples[49:], None, noisy

    def model_optimizer_lr_scheduler_provider(self):
        layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
        return torch.nn.Sequential(*layers), None, None

    def run_forward_step(self, batch, model):
        scale = 1.0 + 0.01 * random.random() + 0.01 * numpy.random.rand()  # both generators go on, too
        return scale * cross_entropy(model(batch["x"]), batch["labels"])


Sums(RapidformerEngine()).train()
