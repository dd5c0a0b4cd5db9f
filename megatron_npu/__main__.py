"""Run the ``megatron-npu`` command as ``python -m megatron_npu``."""

import sys

from megatron_npu.commands.cli import main

if __name__ == "__main__":  # spawned checkpoint writers import this module again
    sys.exit(main())
