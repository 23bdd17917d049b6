"""Read what a shared object needs and holds: libraries, versioned symbols, GPU code."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """A dynamic symbol; ``version`` such as ``GLIBC_2.2.5``, or empty."""

    name: str
    version: str
    defined: bool
    weak: bool
    is_default: bool
    is_exported: bool


@dataclass(frozen=True)
class SharedObject:
    """``archs`` are the GPU architectures of the fat binaries, spelled as in build.toml."""

    needed: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    archs: frozenset[str]


def read(path: Path) -> SharedObject:
    """Parse a shared object.

    Raises:
        ValueError: not an ELF file with a dynamic section; names the file.
    """
    # Imported here: only builds and checks read shared objects, and only they need pyelftools.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            if dynamic is None:
                raise ValueError(f"{path}: has no dynamic section")
            needed = tuple(
                tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"
            )
            section = elf.get_section_by_name(".nv_fatbin")
            archs = frozenset(_fatbin_archs(section.data() if section else b""))
            return SharedObject(needed, tuple(_symbols(elf)), archs)
        except ELFError as error:
            raise ValueError(f"{path}: not a shared object ({error})") from None


def _symbols(elf: Any) -> Iterator[Symbol]:
    names = _version_names(elf)
    versions = elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        if not symbol.name:
            continue
        number = versions.get_symbol(index)["ndx"] if versions else 0
        hidden = isinstance(number, int) and bool(number & 0x8000)
        version = names.get(number & 0x7FFF, "") if isinstance(number, int) else ""
        yield Symbol(
            symbol.name,
            version,
            defined=symbol["st_shndx"] != "SHN_UNDEF",
            weak=symbol["st_info"]["bind"] == "STB_WEAK",
            is_default=not hidden,
            is_exported=symbol["st_info"]["bind"] != "STB_LOCAL",
        )


def _version_names(elf: Any) -> dict[int, str]:
    names = {}
    if required := elf.get_section_by_name(".gnu.version_r"):
        for _, auxiliaries in required.iter_versions():
            for auxiliary in auxiliaries:
                names[auxiliary["vna_other"]] = auxiliary.name
    if defined := elf.get_section_by_name(".gnu.version_d"):
        for definition, auxiliaries in defined.iter_versions():
            names[definition["vd_ndx"]] = next(iter(auxiliaries)).name
    return names


# Layout of NVIDIA's fat binaries, as nvcc 13.0 writes them: containers of a 16-byte header
# (magic u32, version u16, header bytes u16, payload bytes u64) with entries whose header holds
# kind u16 at 0, header bytes u32 at 4, payload bytes u64 at 8, architecture u32 at 28 and flags
# u64 at 40.
_FATBIN_MAGIC = 0xBA55ED50
_KIND_PTX, _KIND_CUBIN = 1, 2
_FLAG_ARCH_SPECIFIC, _FLAG_FAMILY_SPECIFIC = 1 << 20, 1 << 21


def _fatbin_archs(data: bytes) -> Iterator[str]:
    start = 0
    while start + 16 <= len(data):
        magic, _, header_bytes, payload_bytes = struct.unpack_from("<IHHQ", data, start)
        if magic != _FATBIN_MAGIC:  # padding between containers
            start += 8
            continue
        position, end = start + header_bytes, start + header_bytes + payload_bytes
        while position + 64 <= end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, position)
            (number,) = struct.unpack_from("<I", data, position + 28)
            (flags,) = struct.unpack_from("<Q", data, position + 40)
            suffix = "a" * bool(flags & _FLAG_ARCH_SPECIFIC) or "f" * bool(
                flags & _FLAG_FAMILY_SPECIFIC
            )
            if kind in (_KIND_PTX, _KIND_CUBIN):
                ptx = "+PTX" if kind == _KIND_PTX else ""
                yield f"{number // 10}.{number % 10}{suffix}{ptx}"
            position += header + payload
        start = end
