"""Read the symbols that a shared library requires and defines with ``readelf`` (part of binutils).

binutils are installed with every g++.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from megatron_npu.base.errors import UsageError

_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
# number, value, size and type; binding (three words where it is a GNU extension), visibility, section, name
_SYMBOL = re.compile(
    r"\s*\d+: [0-9a-f]+ +\S+ +\S+ +(?P<binding>\S.*?) +(?:DEFAULT|PROTECTED|HIDDEN|INTERNAL) +"
    r"(?:\[.*?\] +)?(?P<section>\S+) (?P<name>[^\s@]+)(?P<version>@\S+)?"
)


@dataclass
class SharedLibrary:
    """The dynamic symbols of a shared library.

    Attributes:
        needed: the names of the libraries it is linked against (DT_NEEDED).
        defined: the symbols it defines.
        undefined: the symbols it imports, if they are strong and have no version (so glibc's are not listed).
    """

    needed: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)


def read(path: Path) -> SharedLibrary:
    """Return the symbols of a shared library.

    The result is empty without a dynamic symbol table.

    Raises:
        UsageError: ``readelf`` is not installed (clang++ with LLVM's own linker works without binutils).
    """
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)]
    try:
        listing = subprocess.check_output(command, env={**os.environ, "LC_ALL": "C"}, text=True)
    except FileNotFoundError:
        raise UsageError(
            "there is no readelf on PATH; it belongs to binutils. Install binutils (Debian, Ubuntu: apt "
            "install binutils)."
        ) from None
    library = SharedLibrary(needed=set(_NEEDED.findall(listing)))
    for symbol in filter(None, map(_SYMBOL.match, listing.splitlines())):
        if symbol["section"] != "UND":
            library.defined.add(symbol["name"])
        elif symbol["binding"] == "GLOBAL" and symbol["version"] is None:
            library.undefined.add(symbol["name"])
    return library
