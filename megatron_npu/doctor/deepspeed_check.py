"""Report the accelerator that DeepSpeed detects in a separate process, which is set up like a run.

    python -m megatron_npu.doctor.deepspeed_check

DeepSpeed also prints to stdout, so the result is the last line.
"""

from __future__ import annotations

import importlib
import json

from megatron_npu import devices
from megatron_npu.process import deepspeed_device


def answer() -> dict[str, str]:
    """Return the names of DeepSpeed's accelerator and of its communication backend."""
    deepspeed_device.choose(devices.current().name)
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    return {"accelerator": accelerator._name, "communication": accelerator.communication_backend_name()}


if __name__ == "__main__":
    print(json.dumps(answer()))
