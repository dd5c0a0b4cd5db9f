"""DataLoaders draw as beside a GPU, from the host's generator: on the CPU, and by tests/sim on the NPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

pytestmark = pytest.mark.usefixtures("redirection")


class Noise(Dataset):
    """Every sample draws, as a tokenizer with dropout or an augmentation does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


LOADERS = {
    "plain": lambda: DataLoader(range(8), batch_size=2),
    "shuffled": lambda: DataLoader(range(8), shuffle=True),
    "with replacement": lambda: DataLoader(range(8), sampler=RandomSampler(range(8), replacement=True)),
    "weighted": lambda: DataLoader(range(8), sampler=WeightedRandomSampler([1.0] * 8, 8)),
    "drawing samples": lambda: DataLoader(Noise()),
    "shuffled and drawing": lambda: DataLoader(Noise(), shuffle=True),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader_does_not_move_the_device_generator(make):
    state = torch.cuda.get_rng_state()
    assert len(list(make())) in (4, 8)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader_follows_the_host_generator(redirection, make):
    torch.manual_seed(11)
    torch.rand(5, device="cuda")
    first = [batch.tolist() for batch in make()]
    torch.manual_seed(11)
    torch.rand(50, device="cuda")
    assert [batch.tolist() for batch in make()] == first
    redirection.off()
    torch.manual_seed(11)
    assert [batch.tolist() for batch in make()] == first, "as torch draws without the redirection"


def test_draws_of_the_device_between_batches_change_no_order():
    torch.manual_seed(2)
    straight = [batch.item() for batch in DataLoader(range(8), shuffle=True)]
    torch.manual_seed(2)
    mixed = []
    for batch in DataLoader(range(8), shuffle=True):
        torch.rand(3, device="cuda")
        mixed.append(batch.item())
    assert mixed == straight


def test_a_sample_may_seed_the_device():
    class Seeding(Noise):
        def __getitem__(self, index: int) -> int:
            torch.cuda.manual_seed(17)
            return index

    torch.cuda.manual_seed(17)
    expected = torch.rand(3, device="cuda")
    list(DataLoader(Seeding()))
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_workers():
    batches = list(DataLoader(list(range(8)), batch_size=2, num_workers=2))
    assert torch.cat(batches).tolist() == list(range(8))
