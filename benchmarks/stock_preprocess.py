"""Run the unpatched tools/preprocess_data.py of a Megatron-LM checkout if triton is missing.

    python stock_preprocess.py CHECKOUT ARGUMENTS...

The tool never computes on a device, but imports a module with triton kernels; only that module is replaced by
an empty one. ``megatron_npu`` is not involved, because this is the baseline.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from pathlib import Path


def main(checkout: Path, arguments: list[str]) -> None:
    """Run the tool as ``__main__`` in this process."""
    sys.path.insert(0, str(checkout))
    if importlib.util.find_spec("triton") is None:
        name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
        module = types.ModuleType(name)
        module.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
        sys.modules[name] = module
    script = str(checkout / "tools" / "preprocess_data.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
