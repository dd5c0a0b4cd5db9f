"""Implement ``megatron-npu doctor``, which inspects the machine and prints a report with advice."""

from __future__ import annotations

import json
from typing import Any

from megatron_npu.base import settings
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError
from megatron_npu.doctor import bugs, copies, environment, launcher, others, software
from megatron_npu.doctor.advice import Report, advice


def main(argv: list[str]) -> int:
    """Print versions, devices, the Megatron that was found, and the results of checking operations and
    communication.

    Returns:
        0 if a run is expected to work, 1 if there is advice to follow; always 0 with ``--known-bugs``.

    Raises:
        UsageError: the folder of ``--megatron`` contains no Megatron.
    """
    parser = Parser(
        "megatron-npu doctor",
        "Check this machine by using it as a training run does, and print problems with their fixes.",
        epilog="exit code: 0 if a run is expected to work, 1 if problems were found",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--quick", action="store_true", help="skip the tests that start processes")
    parser.add_argument(
        "--megatron",
        metavar="PATH",
        help="check the Megatron in this folder (default: MEGATRON_LM_PATH, else the checkout that "
        "contains this clone, else the first on the Python path, else the one in the working "
        "directory)",
    )
    parser.add_argument(
        "--known-bugs",
        action="store_true",
        help="list only the known bugs of the selected Megatron, and whether this package fixes them",
    )
    cluster = parser.add_argument_group("several machines, started with the job's launcher")
    cluster.add_argument(
        "--cluster",
        action="store_true",
        help=(
            "compare all machines of the job: versions, clocks, addresses, HCCL ports, the "
            "connections between machines, and each device"
        ),
    )
    cluster.add_argument(
        "--folder", metavar="DIR", help="with --cluster: check that all machines share this folder"
    )
    cluster.add_argument(
        "--out", metavar="DIR", help="with --cluster: folder for passed.txt, failed.txt and cluster.json"
    )
    options = parser.parse_args(argv)
    if options.cluster:
        return _cluster(options.folder, options.out)
    if options.known_bugs:
        return bugs.tell(options.megatron, as_json=options.json)
    report = inspect(options.megatron, quick=options.quick)
    report["advice"] = advice(report)
    print(json.dumps(report, indent=2) if options.json else text(report))
    return int(bool(report["advice"]))


def _cluster(folder: str | None, out: str | None) -> int:
    from megatron_npu.doctor import cluster  # which needs torch

    settings.check()
    return cluster.main(folder, out)


def inspect(megatron: str | None = None, *, quick: bool) -> Report:
    """Run all checks, and return what they have found.

    If ``quick`` is set, no processes are started.

    Raises:
        UsageError: the folder ``megatron`` contains no Megatron.
    """
    try:
        settings.check()
    except UsageError as error:  # nothing runs with such an environment
        return {"environment": environment.environment(), "settings": {"error": str(error)}}
    package = copies.copies()
    found_by = environment.put_on_path(megatron)
    torch_error = software.torch_import_error()
    report: Report = {
        "versions": software.versions(),
        "package": package,
        "launcher": launcher.launcher(),
        "megatron": {
            **environment.megatron(found_by, pins=torch_error is None),
            "patched_by": software.patched_by(),
        },
        "others": others.others(),
        "environment": environment.environment(),
        "extensions": software.extensions(),
    }
    if torch_error is not None:
        return report | {"torch": {"error": torch_error}}
    return report | _with_torch(report["megatron"], quick=quick)


def _with_torch(megatron: dict[str, Any], *, quick: bool) -> Report:
    from megatron_npu.doctor import hardware, subprocess_checks

    found: Report = {"devices": hardware.device_list()}
    if quick or "error" in found["devices"]:
        return found
    applies = "error" not in megatron and not megatron["failing"]
    found |= subprocess_checks.before_communication(megatron["root"] if applies else None)
    found["communication"] = subprocess_checks.communication()
    return found


def text(report: Report) -> str:
    """Return the report for a terminal, with a heading for each part and the advice at the end."""
    lines = []
    for part, content in report.items():
        if part != "advice" and content:
            lines += [part, *_rows(content), ""]
    told = report["advice"] or [f"none; a run{_of(report)} is expected to work"]
    return "\n".join([*lines, "advice", *(f"  - {line}" for line in told)])


def _of(report: Report) -> str:
    """Return the name of the Megatron that the report describes.

    Scripts of another Megatron would import that one.
    """
    found = report.get("megatron", {})
    return f" with {found['upstream']} {found['version']}" if "upstream" in found else ""


def _rows(content: dict[str, Any]) -> list[str]:
    width = max(map(len, content))
    rows = []
    for name, value in content.items():
        for i, line in enumerate(_lines(value)):
            rows.append(f"  {'' if i else name:<{width}}  {line}")
    return rows


def _lines(value: Any) -> list[str]:
    """Return one line for a plain value, or one line per element of a list of tables."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_plain(row) for row in value]
    return [_plain(value)]


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
