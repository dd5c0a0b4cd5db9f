"""Write a benchmark's results, with the machine, the software versions and the date."""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def write(path: Path, results: dict[str, Any], **versions: str) -> None:
    """Write results, and what they depend on, as JSON.

    Args:
        path: the file; those of benchmarks are in ``RESULTS``.
        results: the measurements. If they contain ``threads``, it replaces torch's number in this process.
        versions: versions of measured software besides Python and torch.
    """
    import torch

    from megatron_npu.base import files
    from megatron_npu.doctor.hardware import processor

    content = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "vector_units": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load": [round(load, 2) for load in os.getloadavg()],
        },
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions},
        **results,
    }
    files.write(path, json.dumps(content, indent=1) + "\n")
