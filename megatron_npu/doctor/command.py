"""``megatron-npu doctor``: examine, advise, print."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron_npu.doctor import examine

Report = dict[str, Any]


def main(argv: list[str]) -> int:
    """Print versions, devices, the Megatron found, and tests of operations and communication.

    Returns:
        0 if a run can be expected to work, 1 if there is advice to follow.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-npu doctor",
        description="Look at this machine the way a run will, and say what is wrong and what to do.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--quick", action="store_true", help="leave out the tests that start processes")
    options = parser.parse_args(argv)
    report = examined(quick=options.quick)
    report["advice"] = advice(report)
    print(json.dumps(report, indent=2) if options.json else text(report))
    return int(bool(report["advice"]))


def examined(*, quick: bool) -> Report:
    """Return everything the doctor finds; ``quick`` starts no processes."""
    report: Report = {
        "versions": examine.versions(),
        "megatron": examine.megatron(),
        "devices": examine.device_list(),
        "environment": examine.environment(),
    }
    if not quick and "error" not in report["devices"]:
        report["operations"] = examine.operations()
        report["communication"] = examine.communication()
    return report


def advice(report: Report) -> list[str]:
    """Return what to do about each thing that is wrong."""
    found = [report[part]["error"] for part in ("megatron", "devices") if "error" in report[part]]
    failing = report["megatron"].get("failing", [])
    if failing:
        found.append(
            f"{len(failing)} patches do not fit this Megatron ({', '.join(failing[:3])}, ...): install a "
            f"supported version, or see `megatron-npu check --megatron {report['megatron']['root']}`."
        )
    return found + _of_device(report) + _of_tests(report)


def _of_device(report: Report) -> list[str]:
    versions, kinds = report["versions"], report["devices"]
    found = []
    if versions["torch-npu"] and kinds.get("selected") != "npu":
        found.append(
            f"torch-npu {versions['torch-npu']} is installed but no NPU is used ({kinds['npu']}): source "
            "CANN's set_env.sh, check `npu-smi info`, and that torch-npu fits torch "
            f"{versions['torch']}."
        )
    if versions["cuda of torch"] and kinds.get("selected") != "cuda":
        found.append(
            f"torch is built for CUDA {versions['cuda of torch']} but no GPU is used ({kinds['cuda']}): "
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )
    return found


def _of_tests(report: Report) -> list[str]:
    operations = report.get("operations", {})
    found = [f"operation {name} fails: {reason}" for name, reason in operations.get("failures", {}).items()]
    found += [
        f"{name} is beyond its limit: run with MEGATRON_NPU_VERIFY={name}"
        for name in operations.get("beyond_limit", [])
    ]
    if "error" in operations:
        found.append(f"The test of the operations ended early: {operations['error']}")
    if "error" in report.get("communication", {}):
        found.append(
            f"Two processes cannot talk: {report['communication']['error']}. Check the interfaces "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, HCCL_SOCKET_IFNAME), firewalls and /dev/shm."
        )
    return found


def text(report: Report) -> str:
    """Return the report for a terminal: a heading for each part, advice last."""
    lines = []
    for part, content in report.items():
        if part != "advice":
            lines += [part, *_rows(content), ""]
    told = report["advice"] or ["nothing: a run can be expected to work"]
    return "\n".join([*lines, "advice", *(f"  - {line}" for line in told)])


def _rows(content: dict[str, Any]) -> list[str]:
    width = max(map(len, content), default=0)
    return [f"  {name:<{width}}  {_plain(value)}" for name, value in content.items()]


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
