"""``megatron-npu run SCRIPT ARGS…``: run an unmodified Megatron script with the import hook armed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_npu import plugin, settings, stock_tools
from megatron_npu.errors import UsageError

_USAGE = """usage: megatron-npu run SCRIPT [ARGUMENTS...]
       torchrun --nproc-per-node N -m megatron_npu run SCRIPT [ARGUMENTS...]

Runs SCRIPT as __main__, as `python SCRIPT ARGUMENTS...` would, with Megatron patched at import.
A Megatron-LM checkout is found in the folder of SCRIPT or above it, or through MEGATRON_LM_PATH."""


def main(argv: list[str]) -> int:
    """Run the script; return 0 (a script that ends with SystemExit ends this process the same way).

    Raises:
        UsageError: no script is given, it is not there, or it is a stock one that cannot work here.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    script = Path(argv[0])
    if not script.is_file():
        raise UsageError(f"no script {script}", "the path of a Python file", "Check the path.")
    stock_tools.refuse(script)
    plugin.install()  # for spawned children, too; other processes follow MEGATRON_NPU_AUTOLOAD
    sys.path[0] = str(script.resolve().parent)  # as the interpreter does for a script
    for checkout in (stock_tools.tree_of(script), settings.MEGATRON_PATH.get()):
        if checkout:
            sys.path.insert(1, str(checkout))
    sys.argv = list(argv)
    runpy.run_path(str(script), run_name="__main__")
    return 0
