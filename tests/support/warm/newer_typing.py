"""``megatron-npu`` for the tests, with the one name of Python 3.12 that Megatron 0.18 and 0.19 take from it.

``megatron.training`` imports ``typing.override`` in one (0.18) or two files (0.19). The product leaves Python
as it is; the tests give it the name, so that they can run these scripts on older Pythons.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

if __name__ == "__main__":
    from megatron_npu.commands import cli

    sys.exit(cli.main())
