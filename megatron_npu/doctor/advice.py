"""Provide instructions for fixing each problem that a report contains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_npu.doctor import launcher, others

Report = dict[str, Any]

# Below this a data loader's workers, gloo and NCCL run out of it: a container's default is 64 MiB.
LEAST_SHARED_MEMORY = 512  # MiB
# Accelerators with less of their memory free are in use by somebody else.
LEAST_FREE = 0.5


def advice(report: Report) -> list[str]:
    """Return instructions for each problem, starting with the most basic problems.

    The list is empty if a run is expected to work.
    """
    versions, devices = report.get("versions", {}), report.get("devices", {})
    return [
        *(report[part]["error"] for part in ("settings", "torch") if part in report),
        *launcher.advice(report.get("launcher", {})),
        *_of_package(report.get("package", {})),
        *_of_megatron(report.get("megatron", {})),
        *_of_versions(versions, devices),
        *others.advice(report.get("others", {})),
        *_of_extensions(report.get("extensions", {})),
        *_of_devices(versions, devices),
        *_of_ledger(report.get("ledger", {})),
        *_of_operations(report.get("operations", {})),
        *_of_deepspeed(report.get("deepspeed", {})),
        *_of_communication(report.get("communication", {})),
    ]


def _of_package(package: dict[str, str]) -> list[str]:
    if "hidden_by" in package:
        return [
            (
                f"The folder {package['hidden_by']} shadows this package for scripts started here: they "
                "import an empty package, and nothing is patched. Run `pip install -e` again in the clone "
                f"(from {package['used']}), or put it on PYTHONPATH."
            )
        ]
    if "another" in package:
        return [
            (
                f"Scripts started here import another copy of this package ({package['another']}) than this "
                f"command does ({package['used']}): remove one of them, or its folder from PYTHONPATH."
            )
        ]
    return []


def _of_megatron(megatron: dict[str, Any]) -> list[str]:
    found = [megatron["error"]] if "error" in megatron else []
    failing = megatron.get("failing", [])
    if failing:
        named = ", ".join(failing[:3]) + (", ..." if len(failing) > 3 else "")
        found.append(
            f"{len(failing)} patches cannot be applied to this Megatron ({named}): install a supported "
            f"version, or see `megatron-npu check --megatron {megatron['root']}`."
        )
    if "working_directory" in megatron:
        found.append(
            f"This directory contains another Megatron ({megatron['working_directory']}), which "
            "scripts started here import: check it with `megatron-npu doctor --megatron .`."
        )
    return found


def _of_versions(versions: dict[str, str | None], devices: dict[str, Any]) -> list[str]:
    found = []
    torch, torch_npu = (_release(versions.get(name)) for name in ("torch", "torch-npu"))
    if torch and torch_npu and torch[:2] != torch_npu[:2]:
        found.append(
            f"torch-npu {versions['torch-npu']} does not match torch {versions['torch']}: the major and "
            f"minor versions must be the same. Install torch-npu {torch[0]}.{torch[1]}.*"
        )
    apex = _release(versions.get("apex"))
    if apex and apex >= (0, 9):
        found.append(
            f"apex {versions['apex']} is another package of that name on PyPI, not NVIDIA's (0.1, from "
            "github.com/NVIDIA/apex): pip uninstall apex."
        )
    if versions.get("transformer-engine") and devices.get("selected", "cuda") != "cuda":
        found.append(
            "transformer-engine is installed and imported by megatron-core, but it requires "
            "CUDA, which this run does not use: pip uninstall transformer-engine, or use "
            "another environment."
        )
    return found


def _of_extensions(extensions: dict[str, list[str]]) -> list[str]:
    return [
        (
            f"An interrupted compilation left {lock}, for which the next compilation (for example at "
            "DeepSpeed's start) would wait forever. Remove this file."
        )
        for lock in extensions.get("stale_locks", [])
    ]


def _of_deepspeed(deepspeed: dict[str, str]) -> list[str]:
    if "error" not in deepspeed:
        return []
    return [
        (
            f"DeepSpeed does not start: {deepspeed['error']}. Install the tested version: pip install "
            "'megatron_npu[deepspeed]'."
        )
    ]


def _release(version: str | None) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version such as ``2.13.0+cpu``."""
    parts = (version or "").partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _unused(versions: dict[str, str | None], devices: dict[str, Any], selected: str) -> Iterator[str]:
    """Yield advice about software for devices that a run would not use."""
    if versions.get("torch-npu") and selected != "npu":
        yield (
            f"torch-npu {versions['torch-npu']} is installed but no NPU is used ({devices['npu']}): "
            "source CANN's set_env.sh, check `npu-smi info`, and check that torch-npu matches torch "
            f"{versions['torch']}."
        )
    # PyPI's torch is built for CUDA: where no driver is there, it is a CPU's torch like another
    if versions.get("cuda of torch") and versions.get("nvidia driver") and selected != "cuda":
        yield (
            f"torch is built for CUDA {versions['cuda of torch']} but no GPU is used ({devices['cuda']}): "
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )


def _of_devices(versions: dict[str, str | None], devices: dict[str, Any]) -> list[str]:
    found = [devices["error"]] if "error" in devices else []
    selected = devices.get("selected")
    if selected:
        found += _unused(versions, devices, selected)
    for device in devices.get("each", []) if selected != "cpu" else []:
        if "free_mib" in device and device["free_mib"] < LEAST_FREE * device["total_mib"]:
            found.append(
                f"{device['device']} has {device['free_mib']} of {device['total_mib']} MiB free: another "
                "process uses it (`npu-smi info`, `nvidia-smi`)."
            )
    shared = devices.get("shared_memory_mib")
    if shared is not None and shared < LEAST_SHARED_MEMORY:
        found.append(
            f"/dev/shm has {shared} MiB: data loaders and communication may crash with a bus error. Start "
            "the container with --shm-size=8g."
        )
    return found


def _of_ledger(ledger: dict[str, Any]) -> list[str]:
    found = [f"patch failed: {line}" for line in ledger.get("failed", [])]
    found += [
        f"Part of Megatron is {reason}. A script that needs this part fails too: install the package."
        for reason in ledger.get("not_imported", [])
    ]
    return found + ([f"Megatron cannot be patched: {ledger['error']}"] if "error" in ledger else [])


def _of_operations(operations: dict[str, Any]) -> list[str]:
    found = [f"operation {name} fails: {reason}" for name, reason in operations.get("failures", {}).items()]
    found += [
        (
            f"{name} deviates too much from its formula (by "
            f"{operations['largest_error'][name]:.2g}): its results on this device are wrong. "
            "MEGATRON_NPU_VERIFY shows which layers of a run are affected."
        )
        for name in operations.get("beyond_limit", [])
    ]
    if "error" in operations:
        found.append(f"The operation tests ended early: {operations['error']}")
    return found


def _of_communication(communication: dict[str, Any]) -> list[str]:
    if "error" not in communication:
        return []
    return [
        (
            f"Two processes cannot communicate: {communication['error']}. Check the interfaces "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, HCCL_SOCKET_IFNAME), firewalls and /dev/shm."
        )
    ]
