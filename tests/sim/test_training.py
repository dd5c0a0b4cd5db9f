"""A small GPT trained on the simulated NPU and on the CPU from the same weights: losses and norms agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = pytest.mark.simulated

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 97, 32, 2, 4, 16


class Block(nn.Module):
    """Pre-norm attention and MLP; [b, s, h] -> [b, s, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).float().masked_fill(mask, -1e4)
        context = scores.softmax(-1).to(v.dtype) @ v
        x = x + self.out(context.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Returns the mean loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def train(device: str, optimizer: Optimizer, dtype: torch.dtype = torch.float32, steps: int = 6) -> Tensor:
    """Return the loss and the gradient norm of each step, [steps, 2]."""
    torch.manual_seed(0)
    model = Gpt().to(dtype).to(device)
    optimizer = optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return torch.tensor(rows)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_training_equals_the_cpu(optimizer, dtype, limit):
    expected, found = train("cpu", optimizer, dtype), train("npu", optimizer, dtype)
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
    assert found[-1, 0] < found[0, 0]


def test_torch_npus_fused_optimizer_equals_adamw():
    from torch_npu.optim import NpuFusedAdamW

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu uses TypedStorage
        found = train("npu", lambda parameters: NpuFusedAdamW(parameters, 1e-2))
    torch.testing.assert_close(found, train("cpu", OPTIMIZERS["adamw"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_casts_what_it_should(dtype):
    layer, norm = nn.Linear(8, 8).npu(), nn.LayerNorm(8).npu()
    x = torch.randn(4, 8, device="npu")
    with torch.autocast("npu", dtype=dtype):
        y = layer(x)
        assert y.dtype == dtype
        assert norm(y).dtype == torch.float32
        assert torch.softmax(y, -1).dtype == torch.float32
        assert (y + y).dtype == dtype
    assert layer(x).dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def mixed_precision(device: str) -> list[tuple[float, float]]:
    """Train with autocast and a loss scale; the third batch overflows. Return (loss, scale) of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for step in range(6):
        x = torch.randn(4, 8, generator=generator) * (1e6 if step == 2 else 1)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = (model(x.to(device)).float() ** 2).sum()
        if step == 2:
            loss = loss * 1e38  # an infinite gradient: the step is left out and the scale halved
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rows.append((loss.item(), scaler.get_scale()))
    return rows


def test_the_loss_scale_follows_overflow_as_on_the_cpu():
    expected, found = mixed_precision("cpu"), mixed_precision("npu")
    assert [scale for _, scale in found] == [scale for _, scale in expected] == [256, 512, 256, 256, 512, 512]
    torch.testing.assert_close(
        torch.tensor([loss for loss, _ in found]),
        torch.tensor([loss for loss, _ in expected]),
        rtol=2e-2,
        atol=1e-2,
    )


def test_embedding_and_index_gradients():
    torch.manual_seed(0)
    table, index = torch.randn(10, 4), torch.tensor([[1, 1, 9], [0, 3, 1]])
    results = []
    for device in ("cpu", "npu"):
        weight = table.clone().to(device).detach().requires_grad_()
        rows = index.to(device)
        y = F.embedding(rows, weight, padding_idx=3) + weight[rows] + weight.index_select(0, rows[0])
        y = y.masked_fill(y > 1, 0.0)
        (y**2).sum().backward()
        results.append((y.detach().cpu(), weight.grad.cpu()))
    torch.testing.assert_close(results[1], results[0])
