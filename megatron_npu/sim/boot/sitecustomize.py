"""Set up the simulator at the start of every Python process under ``megatron-npu sim``."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden_sitecustomize() -> None:
    """Run the user's sitecustomize module, which this module hides, if it exists."""
    others = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _arm(site: str) -> None:
    """Load activate.py from its file, and set up the simulator.

    Importing it as part of its package would arm the plug-in.
    """
    file = os.path.join(os.path.dirname(_HERE), "activate.py")
    spec = importlib.util.spec_from_file_location("megatron_npu.sim.activate", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.arm(site)


_run_hidden_sitecustomize()
if os.environ.get("MEGATRON_NPU_SIM") == "1":
    _arm(os.environ["MEGATRON_NPU_SIM_SITE"])
