"""``python -m megatron_npu`` is the ``megatron-npu`` command."""

import sys

from megatron_npu.commands.cli import main

if __name__ == "__main__":  # spawned checkpoint writers import this module again
    sys.exit(main())
