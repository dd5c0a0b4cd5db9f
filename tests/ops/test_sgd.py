"""FusedSGD: the update written out in fp64, torch's state dicts, what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_npu.ops.optimizers import sgd
from megatron_npu.ops.optimizers.sgd import FusedSGD
from tests.ops.test_adam import give_gradients, parameters

LR = 0.05


def written_out(starts, gradients, momentum, dampening, decay, nesterov, after):
    values, buffers = [s.detach().double().cpu() for s in starts], [None] * len(starts)
    for grads in gradients:
        for i, grad in enumerate(grads):
            grad = grad.double().cpu()
            if not after:
                grad = grad + decay * values[i]
            if momentum:
                first = buffers[i] is None
                buffers[i] = grad if first else momentum * buffers[i] + (1 - dampening) * grad
                grad = grad + momentum * buffers[i] if nesterov else buffers[i]
            if after:
                grad = grad + decay * values[i]
            values[i] = values[i] - LR * grad
    return values


CASES = [
    # momentum, dampening, weight decay, nesterov, decay after the momentum
    (0.0, 0.0, 0.0, False, False),
    (0.0, 0.0, 0.1, False, True),
    (0.9, 0.0, 0.1, False, False),
    (0.9, 0.3, 0.1, False, False),
    (0.9, 0.0, 0.1, True, False),
    (0.9, 0.0, 0.1, True, True),
    (0.9, 0.3, 0.1, False, True),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["bound", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_follows_the_formula(device, case, implementation, dtype):
    if implementation == "reference":
        sgd._sgd.bind("nowhere")
    momentum, dampening, decay, nesterov, after = case
    weights = parameters(device, dtype)
    starts, gradients = [w.detach().clone() for w in weights], []
    optimizer = FusedSGD(weights, LR, momentum, dampening, decay, nesterov, after)
    for step in range(4):
        give_gradients(weights, step)
        gradients.append([w.grad.clone() for w in weights])
        optimizer.step()
    limit = 2e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    for a, b in zip(weights, written_out(starts, gradients, *case), strict=True):
        torch.testing.assert_close(a.detach().double().cpu(), b, rtol=limit, atol=limit)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_dicts_are_torch_s(device, momentum):
    options = {"lr": LR, "momentum": momentum, "weight_decay": 0.1}
    results = []
    for first, second in (
        (torch.optim.SGD, torch.optim.SGD),
        (torch.optim.SGD, FusedSGD),
        (FusedSGD, torch.optim.SGD),
        (FusedSGD, FusedSGD),
    ):
        weights = parameters(device)
        one, other = first(weights, **options), None
        for step in range(4):
            if step == 2:
                other = second(weights, **options)
                other.load_state_dict(one.state_dict())
            give_gradients(weights, step)
            (other or one).step()
        results.append(weights)
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_parameter_that_joins_later_starts_its_own_momentum(device):
    weights = parameters(device)
    optimizer = FusedSGD(weights, LR, momentum=0.9, dampening=0.5)
    give_gradients(weights, 0)
    weights[0].grad = None
    optimizer.step()
    give_gradients(weights, 1)
    before, grad = weights[0].detach().clone(), weights[0].grad.clone()
    optimizer.step()
    torch.testing.assert_close(weights[0].detach(), before - LR * grad)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_updates_the_shards_of_this_rank(momentum):
    """torch's fused kernel takes no sharded tensor, and one rank may hold nothing of a weight."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        starts = [torch.full((rows, 4), 1.0) for rows in (1, 0)]
        shards = [DTensor.from_local(start.clone(), mesh, [Shard(0)]) for start in starts]
        weights = [torch.nn.Parameter(shard) for shard in shards]
        optimizer = FusedSGD(weights, LR, momentum=momentum)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved = LR * (2 + momentum)
        torch.testing.assert_close(weights[0].to_local().detach(), starts[0] - moved)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nesterov": True}, "momentum"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening"),
        ({"materialize_master_grads": False}, "materialize"),
    ],
)
def test_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        FusedSGD([torch.nn.Parameter(torch.ones(1))], lr=LR, **options)
