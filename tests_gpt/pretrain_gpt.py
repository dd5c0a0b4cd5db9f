"""The stock pretrain_gpt.py of Megatron-LM, with this plug-in; the guide moves this file to the root of that.

It takes the arguments of the stock script, and runs where it lies as well.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# where only the root is on the path, the clone's name, megatron_npu, hides the package in it
PROJECTS = [HERE.parent, HERE / "megatron_npu"]
sys.path[1:1] = [str(folder) for folder in PROJECTS if (folder / "megatron_npu" / "__init__.py").is_file()]

from megatron_npu.commands import stock_script  # noqa: E402

if __name__ == "__main__":
    sys.exit(stock_script.main(__file__, "pretrain_gpt.py"))
