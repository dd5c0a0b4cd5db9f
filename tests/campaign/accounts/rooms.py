"""Two accounts of this machine, and the folders of a round of trials (root, Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import tiny

_CLONE_NEWNS = 0x00020000
_PR_SET_DUMPABLE = 4
_FIRST = 61_184  # the first of 2 * 2,000 ids that Debian leaves to nobody


class Room:
    """The folders of a round, and the two accounts.

    Attributes:
        folder: holds all others; both accounts can read it.
        user, stranger: the ids of the account that types the commands, and of the one that owns the files.
        home, temporary: the user's folders.
        evil: the stranger's folder.
        marks: what is executed leaves a file here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.temporary = folder / "home", folder / "tmp"
        is_known = self.home.exists()  # of an earlier call
        self.user = self.home.stat().st_uid if is_known else _FIRST + 2 * (os.getpid() % 2000)
        self.stranger = self.user + 1
        self.evil, self.marks = folder / "evil", folder / "marks"
        folder.chmod(0o755)
        for path, owner in ((self.home, self.user), (self.temporary, self.user), (self.evil, self.stranger)):
            path.mkdir(exist_ok=True)
            os.chown(path, owner, owner)
        self.marks.mkdir(exist_ok=True)
        self.marks.chmod(0o777)

    def environment(self) -> dict[str, str]:
        """Return the user's environment."""
        programs = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": str(tiny.ROOT),
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "USER": f"user{self.user}",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "MEGATRON_NPU_DEVICE": "cpu",
        }

    def become(self, account: int, groups: Sequence[int] = ()) -> None:
        """Make this process one of an account. Its files in /proc stay readable for the superuser."""
        os.setgroups(groups)
        os.setgid(account)
        os.setuid(account)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)

    def give(self, path: Path, account: int | None = None) -> Path:
        """Let an account own a path and all below it, by default the stranger, for others to read."""
        owner = self.stranger if account is None else account
        for each in (path, *path.rglob("*")):
            os.chown(each, owner, owner, follow_symlinks=False)
            if not each.is_symlink() and (each.is_dir() or each.is_file()):
                each.chmod(0o755 if each.is_dir() else 0o644)
        return path

    def place(self, name: str) -> Path:
        """Return a new folder below the stranger's."""
        found = self.evil / name.replace("/", " ")
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir()
        return found

    def mark(self, name: str) -> Path:
        """Return where hostile content leaves a mark if it is executed."""
        return self.marks / name

    def marked(self) -> list[str]:
        """Return and remove the marks."""
        found = []
        for path in self.marks.iterdir():
            found.append(path.name)
            path.rmdir() if path.is_dir() else path.unlink()
        return found

    def processes(self) -> dict[int, str]:
        """Return the user's processes that have not ended, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if entry.stat().st_uid == self.user and state not in "ZX":
                        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                        found[int(entry.name)] = words.decode(errors="replace")[:100]
        return found

    def sweep(self) -> None:
        """Kill the user's processes."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)


def reason_against() -> str:
    """Return why two accounts cannot be had here, or an empty text."""
    if sys.platform != "linux" or os.geteuid():
        return "needs Linux and the superuser, who can be two accounts"
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return "" if not done.returncode else "needs the right to mount"


def separate() -> None:
    """Give this process mounts of its own: an empty /dev/shm, and this Python for every account."""
    os.umask(0o022)  # this package's commands set 027, and other accounts must read these folders
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), tiny.ROOT.resolve()}
    closed: dict[Path, list[Path]] = {}
    for path in needed:
        if (parent := _closed_parent(path)) is not None:
            closed.setdefault(parent, []).append(path)
    for parent, paths in closed.items():
        _open(parent, paths)


def mount(*words: str) -> None:
    """Call mount."""
    subprocess.run(["mount", *words], check=True, timeout=60)


def _closed_parent(path: Path) -> Path | None:
    """Return the first folder on the way to a path that other accounts cannot enter."""
    ways = [each for each in reversed(path.parents) if each != Path("/")]
    return next((each for each in ways if not each.stat().st_mode & 0o001), None)


def _open(parent: Path, paths: list[Path]) -> None:
    """Show only these paths of a folder, to all."""
    aside = Path("/mnt")
    mount("-t", "tmpfs", "tmpfs", str(aside))
    for number, path in enumerate(paths):
        (aside / str(number)).mkdir()
        mount("--bind", str(path), str(aside / str(number)))
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(parent))
    for number, path in enumerate(paths):
        path.mkdir(parents=True)
        mount("--bind", str(aside / str(number)), str(path))
