"""Reads what a shared library needs and defines, from its dynamic section (64-bit little-endian ELF)."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_GNU_VERSYM = 6, 11, 0x6FFFFFFF
_DT_NEEDED = 1
_STB_GLOBAL = 1
_UNVERSIONED = 2  # version indices below this one mean: bound to no version


@dataclass
class SharedLibrary:
    """The dynamic symbol table of one file.

    Attributes:
        needed: names of the libraries it is linked against, DT_NEEDED.
        defined: symbols it defines.
        undefined: symbols it takes from elsewhere: strong and without a version, so glibc's are not listed.
    """

    needed: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)


def read(path: Path) -> SharedLibrary:
    """Return the symbols of a shared library; an empty record if it has no dynamic symbol table."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        return _read(image)


def _read(image: mmap.mmap) -> SharedLibrary:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    by_type = {section[1]: section for section in sections}
    library = SharedLibrary()
    if _SHT_DYNSYM not in by_type:
        return library

    def content(kind: int) -> bytes:
        return image[by_type[kind][4] : by_type[kind][4] + by_type[kind][5]]

    strings = sections[by_type[_SHT_DYNSYM][6]][4]

    def text(offset: int) -> str:
        return image[strings + offset : image.find(b"\0", strings + offset)].decode()

    versions = ()
    if _SHT_GNU_VERSYM in by_type:
        versions = struct.unpack(f"<{by_type[_SHT_GNU_VERSYM][5] // 2}H", content(_SHT_GNU_VERSYM))
    for i, (name, info, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", content(_SHT_DYNSYM))):
        if not name:
            continue
        if section:
            library.defined.add(text(name))
        elif info >> 4 == _STB_GLOBAL and (not versions or versions[i] & 0x7FFF < _UNVERSIONED):
            library.undefined.add(text(name))
    for tag, value in struct.iter_unpack("<QQ", content(_SHT_DYNAMIC)):
        if tag == _DT_NEEDED:
            library.needed.add(text(value))
    return library
