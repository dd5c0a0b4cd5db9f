"""own_program, its names bound before the plug-in is there, as verl's and ms-swift's modules bind them.

Usage: ``own_program_late.py FOLDER``, in the processes of torchrun, with MEGATRON_NPU_AUTOLOAD=0.
"""

from __future__ import annotations

import sys

import own_program

assert "megatron_npu" not in sys.modules

import megatron_npu  # noqa: E402, F401  arms the hook and patches what has been imported

if __name__ == "__main__":
    own_program.main(sys.argv[1])
