"""Two trainings in one process, the second on more data; it prints the iterations of each."""

from __future__ import annotations

import torch

from rapidformer import Finetuner, RapidformerEngine, get_args


class Mean(Finetuner):
    def __init__(self, engine, samples):
        super().__init__(engine=engine)
        self.samples = samples

    def train_valid_test_datasets_provider(self):
        return [torch.ones(1)] * self.samples, None, None, None

    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(1, 1), None, None

    def run_forward_step(self, batch, model):
        return model(batch).square().mean()


engine, before = RapidformerEngine(), dict(vars(get_args()))
for samples in (8, 24, 8):
    outcome = Mean(engine, samples).train()
    rate = engine.prepared.optimizer.param_groups[0]["lr"]
    print(f"{samples} samples: {outcome.iteration} iterations, {len(outcome.losses)} losses, rate {rate:g}")
print("flags as before:", vars(get_args()) == before == vars(RapidformerEngine().args) | {"load_from": None})
