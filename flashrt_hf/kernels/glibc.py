"""Link on a new system for an old one: bind to symbols that glibc 2.28 already had.

glibc 2.34 moved libpthread, libdl and librt into libc, and a linker prefers the new names. The
old ones are still there under their old version, but only stand-ins for the old libraries, which
list nothing else, make the linker choose them. CUDA's static runtime needs about fifty.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from flash_rt.flashrt_hf.kernels import elf

# manylinux_2_28 (PEP 600); its libstdc++ is that of GCC 8.
OLDEST = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 25),
    "CXXABI": (1, 3, 11),
    "GCC": (8, 0, 0),
}
_OLD_LIBRARIES = {
    "libpthread.so.0": ("pthread_", "sem_"),
    "libdl.so.2": ("dl",),
    "librt.so.1": ("shm_", "mq_", "timer_", "aio_"),
}


def is_too_new(version: str) -> bool:
    """Whether a symbol version such as ``GLIBC_2.34`` is newer than manylinux_2_28 has."""
    name, _, number = version.partition("_")
    if name not in OLDEST or not re.fullmatch(r"[\d.]+", number):
        return False
    return tuple(int(part) for part in number.split(".")) > OLDEST[name]


def old_library_flags(compiler: str, work: Path) -> list[str]:
    """Write stand-ins for the libraries that glibc 2.34 dissolved; linker arguments to use them.

    On a system that still has those libraries they are simply named.
    """
    found = subprocess.run(
        [compiler, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True
    )
    symbols = elf.read(Path(found.stdout.strip()).resolve()).symbols
    moved = {s.name for s in symbols if s.defined and s.is_default and is_too_new(s.version)}
    kept = {
        s.name: s.version
        for s in symbols
        if s.name in moved and s.version.startswith("GLIBC_") and not is_too_new(s.version)
    }
    if not any(name.startswith("pthread_") for name in kept):
        return ["-ldl", "-lpthread", "-lrt"]
    folder = work / "glibc"
    folder.mkdir(exist_ok=True)
    return [
        str(_stand_in(compiler, folder / library, kept, prefixes))
        for library, prefixes in _OLD_LIBRARIES.items()
    ]


def _stand_in(compiler: str, target: Path, kept: dict[str, str], prefixes: Iterable[str]) -> Path:
    if target.is_file():
        return target
    by_version: dict[str, list[str]] = {}
    for name, version in sorted(kept.items()):
        if name.startswith(tuple(prefixes)) and re.fullmatch(r"\w+", name):
            by_version.setdefault(version, []).append(name)
    names = [name for names in by_version.values() for name in names]
    source = target.with_suffix(".c")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    script = target.with_suffix(".map")
    script.write_text("".join(f"{v} {{ {'; '.join(n)}; }};\n" for v, n in by_version.items()))
    options = f"-shared -nostdlib -fPIC -w -fno-builtin -Wl,-soname,{target.name}".split()
    subprocess.run(
        [compiler, *options, f"-Wl,--version-script={script}", "-x", "c", source, "-o", target],
        check=True,
        capture_output=True,
    )
    return target


# Symbols that newer compilers' headers use and old libraries lack, defined inside the extension.
COMPATIBILITY_SOURCE = """\
// Generated. What headers of newer compilers expect from newer libraries; see glibc.py.
#include <new>
#include <sstream>

// GLIBCXX_3.4.26 has the default constructors that torch's headers call.
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

#pragma GCC visibility push(hidden)
// GLIBC_2.32. False is always right: it only says that atomic operations are needed.
extern "C" char __libc_single_threaded = 0;
namespace std {
// GLIBCXX_3.4.29
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#pragma GCC visibility pop
"""
