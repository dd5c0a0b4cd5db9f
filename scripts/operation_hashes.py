"""Hash the results of every operation's examples on this device: operation_hashes.py [--compare FILE]

Each example runs forward and backward in fp32 and in bf16, with the same seed. Its hash covers the bytes of
the output and of all gradients. To compare two versions of the package, run this file with each of them on
PYTHONPATH, with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -P``. With --compare, the hashes are compared with
those of an earlier run, and the exit code is 1 if some differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.doctor import operations


def found(dtype: torch.dtype) -> dict[str, str]:
    """Return the hash of each example's results in the given dtype, keyed by dtype and name."""
    results = {}
    for name, call in operations.examples().items():
        torch.manual_seed(1)
        made: list[Tensor] = []

        def make(*shape: int, made: list[Tensor] = made) -> Tensor:
            tensor = torch.randn(shape).to(devices.current().torch_device(), dtype).requires_grad_()
            made.append(tensor)
            return tensor

        output = call(make)
        if output is None:  # an operation without a gradient, which changes its tensors in place
            tensors = made
        else:
            output.backward(torch.randn(output.shape).to(output))
            tensors = [output, *(each.grad for each in made if each.grad is not None)]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        results[f"{str(dtype).removeprefix('torch.')} {name}"] = digest.hexdigest()
    return results


def main() -> int:
    """Print the hashes as JSON, or the names whose hashes differ from those of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="the output of an earlier run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = found(torch.float32) | found(torch.bfloat16)
    if options.compare is None:
        print(json.dumps(ours, indent=1))
        return 0
    theirs = json.loads(options.compare.read_text(encoding="utf-8"))
    shared = [name for name in theirs if name in ours]
    different = [name for name in shared if theirs[name] != ours[name]]
    gone = [name for name in theirs if name not in ours]
    print(f"{len(shared) - len(different)} of {len(shared)} are equal; {len(ours) - len(shared)} are new")
    print(*(f"differs: {name}" for name in different), *(f"gone: {name}" for name in gone), sep="\n")
    return 1 if different or gone else 0


if __name__ == "__main__":
    sys.exit(main())
