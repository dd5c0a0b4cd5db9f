"""Checkpoints of stock scripts in an object storage, which is moto's S3 here: object_storage.py (by hand)

Needs the packages multi-storage-client and moto[server] (a venv of its own does, on PYTHONPATH). A run of a
megatron-core's script saves to ``msc://`` and ends, another one resumes from there; the losses are those of a
run that saves to a disk, and each checkpoint is whole by its last object. Another run is killed while the
storage stops after the first object of its second checkpoint: this one is not whole, and the next run resumes
from the first. What upstream's writers do not reach is refused in one line. `pretrain` and `train` save to a
disk, which is lost, and copy each checkpoint to the storage, also through fsspec's ``s3://`` (--scheme s3,
with the package s3fs). scripts/machines_page.py reads benchmarks/results/machines/object_storage.json.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from packaging.version import Version

from megatron_npu.checkpoint_files.object_storage import FLAG
from tests.campaign import machines, stalling_storage
from tests.conftest import ROOT, checkout
from tests.support import ports, stock_core

CONFIG = """
profiles:
  s3:
    storage_provider:
      type: s3
      options: {{base_path: checkpoints, endpoint_url: '{url}', region_name: us-east-1}}
    credentials_provider: {{type: S3Credentials, options: {{access_key: x, secret_key: y}}}}
"""
ADDRESS = "msc://s3/run"
LOSS = r"\biteration +\d+/.*?\bloss: (\S+)"  # of a step; train also logs losses of validation
REFUSED = {
    "a scheme of another client": (["--save", "s3://checkpoints/run"], r"error: --save s3://.*msc://PROFILE"),
    "the format torch": (["--save", ADDRESS, "--ckpt-format", "torch"], r"error: --save msc://.*torch_dist"),
    "parts": (["--save", ADDRESS, "--save-per-machine"], r"error: --save msc://.*--save-per-machine"),
    "no client": (
        ["--save", ADDRESS, "--disable-msc"],
        r"error: --save msc://.*(multi-storage-client|--enable-msc)",
    ),
}


def started(version: str, folder: Path, *flags: str, ranks: int = 2) -> subprocess.Popen[str]:
    """Start a version's script in a folder."""
    tree = checkout("megatron_core", version)
    own = {
        "MSC_CONFIG": str(folder / "msc.yaml"),
        "MEGATRON_LM_PATH": str(tree),
        "MEGATRON_NPU_DEVICE": "cpu",
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = ["run", str(tree / "pretrain_gpt.py"), "--mock-data", *stock_core.FLAGS, *opened(tree), *flags]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "megatron_npu", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **own},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def opened(tree: Path) -> list[str]:
    """Return the flags with which a tree opens addresses: since 0.18 only on request."""
    flags = (tree / "megatron" / "training" / "arguments.py").read_text(encoding="utf-8")
    return ["--enable-msc"] if "'--enable-msc'" in flags else []


def asynchronously(version: str) -> list[str]:
    """Return the flags of an asynchronous save; newer versions' default needs nvidia-resiliency-ext."""
    flags = ["--async-save", "--use-persistent-ckpt-worker"]
    return [*flags, "--async-strategy", "mcore"] if Version(version) >= Version("0.18") else flags


def trained(version: str, folder: Path, *flags: str, ranks: int = 2) -> tuple[int, str]:
    """Run a version's script in a folder; return its code and what it said."""
    process = started(version, folder, *flags, ranks=ranks)
    text = process.communicate(timeout=1200)[0]
    return process.returncode, text


def names(store: Any) -> list[str]:
    """Return the names of all objects."""
    return [each["Key"] for each in store.list_objects_v2(Bucket="checkpoints").get("Contents", [])]


def killed(
    version: str, folder: Path, store: Any, storage: stalling_storage.Stalling, expected: list[str]
) -> list[str]:
    """Kill a run in its second save, and return what is wrong with the next run."""
    place = ADDRESS.replace("/run", "/killed")
    flags = ["--save", place, "--load", place, "--save-interval", "2"]
    process = started(version, folder, *flags)
    said = _read_aside(process)
    if not _kill_in_a_save(process, storage, said):
        return [f"the run to be killed has ended: code {process.returncode}: {said()[-1500:]}"]
    first = losses(said())[:2]
    if any_whole := _objects_of_a_part(store):
        return [any_whole]
    code, text = trained(version, folder, *flags)
    faults = [] if code == 0 else [f"the run after a kill: code {code}: {text[-1500:]}"]
    if not re.search(r"loaded checkpoint from .* at iteration 2\b", text):
        faults.append(f"the run after a kill has not resumed from iteration 2: {text[-800:]}")
    whole = [*first, *losses(text)]
    return faults + ([] if whole == expected else [f"losses after a kill {whole}, without {expected}"])


def _kill_in_a_save(
    process: subprocess.Popen[str], storage: stalling_storage.Stalling, ended: Callable[[], str]
) -> bool:
    """Kill a run in its second save; return False if it has ended before.

    Args:
        ended: waits until all its processes have ended.
    """
    with storage.stopping("/checkpoints/killed/iter_0000004/"):
        while process.poll() is None and not storage.reached.is_set():
            time.sleep(0.05)
        if process.poll() is not None:
            return False
        os.killpg(process.pid, signal.SIGKILL)
        ended()
    return True


def _objects_of_a_part(store: Any) -> str:
    """Return what is wrong if the second checkpoint is not there in part."""
    there = [name for name in names(store) if "killed/iter_0000004/" in name]
    if not there or "killed/iter_0000004/_SUCCESS" in there:
        return f"the kill was not in the midst of the second checkpoint: {there}"
    return ""


def _read_aside(process: subprocess.Popen[str]) -> Callable[[], str]:
    """Read what a process says while something else is watched, lest a full pipe stops it.

    Returns:
        A function that waits for the process's end, and returns all of it.
    """
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(process.communicate()[0]))
    reader.start()

    def all_of_it() -> str:
        reader.join(60)
        return "".join(texts)

    return all_of_it


@dataclass(frozen=True)
class Ours:
    """``pretrain`` or ``train``, with a version of megatron-core, on some ranks."""

    command: str
    version: str
    ranks: int = 2


def ours(what: Ours, folder: Path, store: Any, storage: stalling_storage.Stalling, address: str) -> list[str]:
    """Return what is wrong with ``--object-storage``: the disk is lost twice, once in the midst of a copy."""
    found: dict[str, list[str]] = {}
    faults: list[str] = []
    for name, more in (("disk", []), ("storage", [FLAG, address])):
        place = folder / name
        flags = ["--save", str(place), "--load", str(place), "--save-interval", "2", *more]
        for iterations in (2, 6):
            process = of_ours(what, folder, iterations, *flags)
            text = process.communicate(timeout=1200)[0]
            found.setdefault(name, []).extend(re.findall(LOSS, text))
            if process.returncode:
                faults.append(f"{name}, to iteration {iterations}: code {process.returncode}: {text[-1500:]}")
            if more:
                shutil.rmtree(place, ignore_errors=True)
    if found["storage"] != found["disk"] or len(found["disk"]) != 6:
        faults.append(f"losses {found}")
    whole = sorted(name for name in names(store) if name.endswith("/_SUCCESS"))
    if whole != [f"run/iter_000000{number}/_SUCCESS" for number in (2, 4, 6)]:
        faults.append(f"complete: {whole}")
    expected = address.replace("/run", "/killed"), found["disk"]
    return faults + _killed_in_a_copy(what, folder, store, storage, expected)


def _killed_in_a_copy(
    what: Ours,
    folder: Path,
    store: Any,
    storage: stalling_storage.Stalling,
    expected: tuple[str, list[str]],
) -> list[str]:
    """Kill a run in the copy of its second checkpoint, lose its disk, and return what is wrong with the next.

    Args:
        expected: the address, and the losses of a run without a kill.
    """
    address, place = expected[0], folder / "killed"
    flags = ["--save", str(place), "--load", str(place), "--save-interval", "2", FLAG, address]
    first = of_ours(what, folder, 2, *flags)
    said = re.findall(LOSS, first.communicate(timeout=1200)[0])
    process = of_ours(what, folder, 6, *flags)
    ended = _read_aside(process)
    if not _kill_in_a_save(process, storage, ended):
        return [f"the run to be killed has ended: code {process.returncode}: {ended()[-1500:]}"]
    if any_whole := _objects_of_a_part(store):
        return [any_whole]
    shutil.rmtree(place)
    process = of_ours(what, folder, 6, *flags)
    text = process.communicate(timeout=1200)[0]
    faults = [f"after a kill: code {process.returncode}: {text[-1500:]}"] if process.returncode else []
    if "resuming from iteration 2" not in text:
        faults.append(f"after a kill it has not resumed from iteration 2: {text[-800:]}")
    said += re.findall(LOSS, text)
    return faults + ([] if said == expected[1] else [f"losses after a kill {said}, without {expected[1]}"])


def of_ours(what: Ours, folder: Path, iterations: int, *flags: str) -> subprocess.Popen[str]:
    """Start a command, up to an iteration."""
    command, version = what.command, what.version
    words = machines.COMMANDS["driver" if command == "pretrain" else command]().words(folder, 6)
    ends = [] if iterations == 6 else ["--exit-interval", str(iterations)]
    if ends and command == "train":
        ends = ["--train-iters", str(iterations)]
    wheel = ROOT / "checkouts" / f"megatron_core-{version}"
    tree = wheel if wheel.is_dir() else checkout("megatron_core", version)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(what.ranks)]
    launcher = [*(torchrun if what.ranks > 1 else []), "-m", "megatron_npu"]
    basic = {"OMP_NUM_THREADS": "1", "MEGATRON_NPU_DEVICE": "cpu", "MSC_CONFIG": str(folder / "msc.yaml")}
    return subprocess.Popen(
        [sys.executable, *launcher, *words, *ends, *flags],
        env={**os.environ, "PYTHONPATH": path, "MEGATRON_LM_PATH": str(tree), **basic},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def losses(text: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", text)


def look(version: str, folder: Path, store: Any, storage: stalling_storage.Stalling) -> list[str]:
    """Return what is wrong."""
    faults = []
    both = {ADDRESS: "storage", str(folder / "disk"): "disk"}
    found: dict[str, list[str]] = {}
    for place, name in both.items():
        flags = ["--save", place, "--load", place, "--save-interval", "2"]
        for more in (["--exit-interval", "2"], asynchronously(version)):
            code, text = trained(version, folder, *flags, *more)
            found.setdefault(name, []).extend(losses(text))
            if code:
                faults.append(f"{name} {more}: code {code}: {text[-1500:]}")
    if found["storage"] != found["disk"] or not found["disk"]:
        faults.append(f"losses {found}")
    if list(folder.glob("msc:*")):
        faults.append("a folder of the address's name was made")
    objects = store.list_objects_v2(Bucket="checkpoints").get("Contents", [])
    by_name = {each["Key"]: each["LastModified"] for each in objects}
    checkpoints = {name.split("/")[1] for name in by_name if "/iter_" in name}
    faults += [f"{each} has no _SUCCESS" for each in checkpoints if f"run/{each}/_SUCCESS" not in by_name]
    if not checkpoints or "run/latest_checkpointed_iteration.txt" not in by_name:
        faults.append(f"no checkpoint among {sorted(by_name)}")
    faults += killed(version, folder, store, storage, found["disk"])
    for name, (flags, line) in REFUSED.items():
        code, text = trained(version, folder, *flags, "--save-interval", "2", ranks=1)
        if code != 1 or not re.search(line, text):
            faults.append(f"{name}: code {code}: {text[-800:]}")
    return faults


def main(argv: list[str] | None = None) -> int:
    """Print what is wrong; return 1 if something is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", nargs="+", default=["0.16.1"], help="of megatron-core")
    parser.add_argument(
        "--command", nargs="+", default=["pretrain_gpt.py"], choices=["pretrain_gpt.py", "pretrain", "train"]
    )
    parser.add_argument(
        "--scheme",
        default="msc",
        choices=["msc", "s3"],
        help="of the address of pretrain and train",
    )
    parser.add_argument("--ranks", type=int, default=2, help="of pretrain and train")
    parser.add_argument(
        "--output", type=Path, help="a JSON file of results, to which each version's is added"
    )
    given = parser.parse_args(argv)
    failed = False
    for version in given.version:
        for command in given.command:
            faults = judged(command, version, given.scheme, given.ranks)
            failed = failed or bool(faults)
            print(f"{command} {version} {given.scheme}: {'; '.join(faults) or 'as it should'}", flush=True)
            if given.output:
                alone = "/one" * (given.ranks == 1)
                machines.record(given.output, f"{command}/{version}/{given.scheme}{alone}", faults)
    return int(failed)


def judged(command: str, version: str, scheme: str = "msc", ranks: int = 2) -> list[str]:
    """Return what is wrong with a command and version, in a storage of its own."""
    port = ports.free_port()
    url = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": url}
    with stalling_storage.serving(port) as storage, tempfile.TemporaryDirectory() as name:
        store = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        store.create_bucket(Bucket="checkpoints")
        folder = Path(name)
        (folder / "msc.yaml").write_text(CONFIG.format(url=url), encoding="utf-8")
        if command == "pretrain_gpt.py":
            return look(version, folder, store, storage)
        address = ADDRESS if scheme == "msc" else "s3://checkpoints/run"
        return ours(Ours(command, version, ranks), folder, store, storage, address)


if __name__ == "__main__":
    sys.exit(main())
