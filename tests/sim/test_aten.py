"""Every operation of torch's own catalogue (OpInfo): simulated NPU against CPU, results and gradients.

Both sides compute with the same CPU kernels, so this shows that arguments, results, aliases and autograd
are carried correctly, not that a kernel is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.simulated

# dtype -> (samples per operation, whether gradients are compared, operations that must be compared at least)
DTYPES = {
    torch.float32: (8, True, 520),
    torch.bfloat16: (4, True, 420),
    torch.float16: (3, False, 400),
    torch.int64: (3, False, 350),
    torch.bool: (3, False, 250),
}

# torch_npu refuses these samples on hardware too; the operation's other samples are compared.
REFUSALS = (
    "Only contiguous_format or preserve_format is supported",
    "The function 'stft' is not differentiable with respect to argument 'window'",
)

# Limits of torch_npu or of the device, by operation. An entry that is none any more fails the test.
SPARSE = "torch_npu has no sparse kernels"
NO_FLOAT64 = "the device has no float64: torch_npu casts to float32"
EXCEPTIONS = {
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
    "double": NO_FLOAT64,
    "float_power": NO_FLOAT64,
    "tensor_split": "the sample's indices must stay on the host, as for CUDA",
}
SAMPLES_OF_EXCEPTIONS = 8

# Results are uninitialised, or depend on the random generator (test_generators.py has those).
UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
RANDOM = (
    "bernoulli cauchy exponential geometric log_normal multinomial normal rand randn uniform dropout randint "
    "feature_alpha gumbel rrelu fractional multi_head_attention svd_lowrank pca_lowrank"
).split()


def device_copy(value: Any) -> Any:
    """Return a sample's argument for the NPU: tensors copied, devices renamed, everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("npu").requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("npu")
    return value


def host_copy(value: Any) -> Any:
    """Return a tensor of its own, so that an operation in place does not change the sample."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # The same kernels, but aliases can be aligned differently, which changes the order of vectorised sums.
    low = dtype in (torch.bfloat16, torch.float16)
    return {"rtol": 1e-2, "atol": 1e-2} if low else {"rtol": 1e-4, "atol": 1e-5}


def gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    outputs = [x for x in outputs if x.requires_grad]
    if not outputs or not inputs:
        return ()
    return torch.autograd.grad([x.abs().sum() for x in outputs], inputs, allow_unused=True)


def compare(host: torch.Tensor | None, device: torch.Tensor | None, **limits: float) -> None:
    assert (host is None) == (device is None), "a gradient on one side only"
    if host is None:
        return
    assert device.device.type == "npu" or host.dim() == 0, f"the result is on {device.device}"
    torch.testing.assert_close(device.detach().cpu(), host.detach(), equal_nan=True, **limits)


def check_sample(operation: Callable, sample: Any, dtype: torch.dtype, values: bool) -> bool:
    """Compare one sample; return False if the CPU cannot do it either, or torch_npu refuses it."""
    tree = (sample.input, sample.args, sample.kwargs)
    host_tree = tree_map(host_copy, tree)
    try:
        expected = operation(host_tree[0], *host_tree[1], **host_tree[2])
        wanted = gradients(tensors(expected), [x for x in tensors(host_tree) if x.requires_grad])
    except Exception:
        return False
    device_tree = tree_map(device_copy, tree)
    try:
        found = operation(device_tree[0], *device_tree[1], **device_tree[2])
        got = gradients(tensors(found), [x for x in tensors(device_tree) if x.requires_grad])
    except RuntimeError as error:
        if any(text in str(error) for text in REFUSALS):
            return False
        raise
    assert len(tensors(expected)) == len(tensors(found))
    assert len(wanted) == len(got)
    if values and not sample.kwargs.get("dropout_p"):
        for host, device in zip((*tensors(expected), *wanted), (*tensors(found), *got), strict=True):
            compare(host, device, **tolerance(dtype))
    return True


def catalogue(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for operation in op_db:
        name = operation.name + (f".{operation.variant_test_name}" if operation.variant_test_name else "")
        if dtype in operation.supported_dtypes("cpu") and operation.name not in UNDEFINED:
            yield name, operation


def compare_catalogue(dtype: torch.dtype) -> tuple[dict[str, str], set[str]]:
    """Return operation -> what went wrong, and the operations of which a sample was compared."""
    count, with_gradients, _ = DTYPES[dtype]
    failures, compared = {}, set()
    for name, operation in catalogue(dtype):
        torch.manual_seed(0)
        needs_grad = with_gradients and dtype in operation.supported_backward_dtypes("cpu")
        values = not any(word in name for word in RANDOM)
        samples = operation.sample_inputs("cpu", dtype, requires_grad=needs_grad)
        taken = SAMPLES_OF_EXCEPTIONS if name in EXCEPTIONS and dtype == torch.float32 else count
        try:
            for _, sample in zip(range(taken), samples, strict=False):
                if check_sample(operation, sample, dtype, values):
                    compared.add(name)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return failures, compared


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_operation(dtype):
    pytest.importorskip("expecttest", reason="torch's OpInfo needs expecttest")
    # The catalogue walks the whole stack for every sample. Under pytest that takes a hundred times as long as
    # the comparison; the stack of a thread is short.
    with ThreadPoolExecutor(1) as pool:
        failures, compared = pool.submit(compare_catalogue, dtype).result()
    unexpected = {name: text for name, text in failures.items() if name not in EXCEPTIONS}
    assert not unexpected, "\n".join(f"{name}: {text}" for name, text in unexpected.items())
    assert len(compared) >= DTYPES[dtype][2]
    if dtype == torch.float32:
        assert set(EXCEPTIONS) <= set(failures), "no exception any more"
