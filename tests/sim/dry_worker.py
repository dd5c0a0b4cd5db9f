"""Each operation's dtype, sizes and strides where it is computed and where it is left out.

    megatron-npu sim -- python -m tests.sim.dry_worker [NAME ...]

Cases are those of torch's own tests (``op_db``), two samples in bf16 and fp32, forward, made on the host;
NAME chooses operations, else all but those whose results' sizes depend on values. Two forks run them on the
simulated NPU, one with a dry limit of a byte. What differs is printed, and the exit code is 1 then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers torch.npu)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from megatron_npu.sim import build

_SAMPLES = 2
# Sizes of results depend on values, or values are checked, which nobody knows in a dry run.
_BY_VALUE = (
    "nonzero masked_select unique argwhere repeat_interleave bincount histc cholesky linalg svd lu qr "
    "eig ormqr triangular_solve geqrf pinverse allclose equal isclose item ctc_loss sparse to_sparse "
    "segment stft istft fft jiterator _refs logdet matrix pca_lowrank nn.functional.ctc "
    "nn.functional.embedding_bag __getitem__ nn.functional.one_hot combinations "
    "nn.functional.multi_margin nn.functional.multilabel"
).split()


def main(chosen: list[str]) -> int:
    """Compare; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = [_forked(Path(folder, name), chosen, limit) for name, limit in (("full", 0), ("dry", 1))]
    full, dry = found
    differing = [key for key in full if full[key] != dry[key] and isinstance(full[key], list)]
    for key in differing:
        print(f"{key}: computed {full[key]}, left out {dry[key]}")
    names = {key.split(" ")[0] for key in full}
    print(f"{len(full)} calls of {len(names)} operations, {len(differing)} differ")
    return int(bool(differing) or not full)


def _forked(path: Path, chosen: list[str], limit: int) -> dict[str, Any]:
    child = os.fork()
    if not child:
        try:
            if limit:  # read when the first operation asks for it
                build.runtime_library().sim_set(b"dry", str(limit).encode())
            path.write_text(json.dumps(_all(chosen)))
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(path.read_text())


def _all(chosen: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.npu.set_device(0)
    found = {}
    for operation in op_db:
        if operation.name not in chosen if chosen else operation.name.startswith(tuple(_BY_VALUE)):
            continue
        for dtype in (torch.bfloat16, torch.float32):
            for at, sample in enumerate(_samples(operation, dtype)):
                name = f"{operation.name}.{operation.variant_test_name}".rstrip(".")
                found[f"{name} {dtype} {at}"] = _described(operation, sample)
    return found


def _samples(operation: Any, dtype: torch.dtype) -> list[Any]:
    if dtype not in operation.dtypes:
        return []
    try:
        return [
            sample for _, sample in zip(range(_SAMPLES), operation.sample_inputs("cpu", dtype), strict=False)
        ]
    except Exception:
        return []  # a case of torch's that needs what is not here


def _described(operation: Any, sample: Any) -> Any:
    """Return dtype, sizes and strides of each result, or the error's type."""
    moved = sample.transform(lambda each: each.to("npu") if isinstance(each, torch.Tensor) else each)
    try:
        results = operation(moved.input, *moved.args, **moved.kwargs)
    except Exception as error:
        return type(error).__name__
    tensors = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
    return [[str(each.dtype), list(each.shape), list(each.stride())] for each in tensors]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
