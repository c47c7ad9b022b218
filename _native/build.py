"""Builds the two native modules: aiozc._reactor_c (cffi, API mode) from the C files beside this one and
the system's liburing, and aiozc._fast (CPython API) from those in fast/.

Run as a script from the project's root it compiles into aiozc/; setup.py uses `ffibuilder` and `fast`. The
cdef is the part of aiozc.h between its two marks, so header and binding cannot differ.
Environment: AIOZC_WERROR=1 (warnings are errors), AIOZC_SANITIZE=address,undefined (and debug symbols),
AIOZC_FAULTS=1 (fault knobs for tests: _native/faults.h; never in a build for use),
AIOZC_STATIC_LIBURING=1 (liburing.a is linked in, and `licence` is the text to be shipped with it; for wheels),
AIOZC_LIBURING_LICENSE=FILE (that text, where it is not found by itself).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cffi import FFI
from setuptools import Distribution, Extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = [
    "table",
    "slab",
    "optable",
    "pages",
    "regions",
    "sendq",
    "dgramq",
    "errqueue",
    "msgzc",
    "sockids",
    "reactor",
    "conn",
    "write",
    "stall",
    "uring",
    "uring_ring",
    "uring_submit",
    "uring_reap",
    "uring_regions",
    "uring_orphans",
    "epoll",
    "probe",
]  # and, with AIOZC_FAULTS=1, "faults"
FAST = ["module", "turn", "events", "feed", "schedule", "handle", "ready", "timers"]
FAST += ["transport", "life", "accept", "operation", "stage", "parts", "slot"]
NEEDS = (2, 3)
REMEDY = "install it with: apt-get install gcc pkg-config liburing-dev python3-dev"


def fail(what: str) -> None:
    raise SystemExit(f"aiozc: {what}; {REMEDY}")


def static() -> bool:
    return os.environ.get("AIOZC_STATIC_LIBURING", "0") not in ("", "0")


def liburing() -> tuple[str, list[str], list[str]]:
    """Version, compiler flags and what is given to the linker of the system's liburing, by pkg-config."""
    tool = os.environ.get("PKG_CONFIG") or shutil.which("pkg-config")
    if tool is None:
        fail("pkg-config is missing")
    assert tool is not None

    def ask(flag: str) -> str:
        out = subprocess.run([tool, flag, "liburing"], capture_output=True, text=True)
        if out.returncode != 0:
            fail("liburing's headers are missing (Debian package liburing-dev)")
        return out.stdout.strip()

    version = ask("--modversion")
    if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) < NEEDS:
        fail(f"liburing {version} is too old, 2.3 or newer is needed (package liburing-dev)")
    libs = ask("--libs").split()
    if static():
        archive = Path(ask("--variable=libdir")) / "liburing.a"
        if not archive.is_file():
            fail(f"AIOZC_STATIC_LIBURING is set and there is no {archive}")
        # Its symbols stay inside: another extension of the process may bring a liburing of its own.
        libs = [str(archive), f"-Wl,--exclude-libs,{archive.name}"]
    return version, ask("--cflags").split(), libs


def licence() -> Path:
    """The terms of the liburing that is linked in, as the system or its own build installed them."""
    if named := os.environ.get("AIOZC_LIBURING_LICENSE"):
        places = [Path(named)]
    else:
        asked = [os.environ.get("PKG_CONFIG") or "pkg-config", "--variable=prefix", "liburing"]
        prefix = Path(
            subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "/usr"
        )
        places = [
            prefix / "share/doc/liburing-dev/copyright",  # Debian
            prefix / "share/licenses/liburing/LICENSE",  # Fedora, Alpine, scripts/wheel_liburing.sh
        ]
    for place in places:
        if place.is_file() and "Permission is hereby granted, free of charge" in place.read_text():
            return place
    raise SystemExit(
        "aiozc: AIOZC_STATIC_LIBURING is set, and the terms of liburing (MIT), which must go with it, are in "
        f"none of {', '.join(map(str, places))}; name the file by AIOZC_LIBURING_LICENSE=FILE"
    )


def cdef(header: str) -> str:
    text = (HERE / header).read_text()
    return text.split("/* cdef begin */", 1)[1].split("/* cdef end */", 1)[0]


def flags() -> tuple[list[str], list[str]]:
    """Of the compiler and of the linker, for both modules."""
    compile_args = ["-std=gnu11", "-O2", "-g", "-fvisibility=hidden"]
    link_args = []
    if os.environ.get("AIOZC_WERROR"):
        # cffi's generated glue is compiled with the same flags: only what it itself does is allowed.
        compile_args += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
        compile_args += ["-Wno-missing-field-initializers", "-Wno-cast-function-type"]
        compile_args += ["-Wno-unused-parameter"]
    if sanitize := os.environ.get("AIOZC_SANITIZE"):
        compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1"]
        link_args.append(f"-fsanitize={sanitize}")
    if with_faults():
        compile_args.append("-DAIOZC_FAULTS=1")
    return compile_args, link_args


def with_faults() -> bool:
    return os.environ.get("AIOZC_FAULTS", "0") not in ("", "0")


def beside(name: str) -> str:
    return os.path.relpath(HERE / name, ROOT)


def make() -> FFI:
    if not sys.platform.startswith("linux"):
        raise SystemExit("aiozc: Linux only (io_uring and epoll); there is no build elsewhere")
    if shutil.which(os.environ.get("CC", "gcc").split()[0]) is None:
        fail("no C compiler (gcc)")
    version, cflags, libs = liburing()
    compile_args, link_args = flags()
    if static():
        cflags.append("-DAZC_LIBURING_STATIC")
    ffi = FFI()
    ffi.cdef(cdef("aiozc.h"))
    if with_faults():
        ffi.cdef(cdef("faults.h"))
    ffi.set_source(
        "aiozc._reactor_c",
        '#include "aiozc.h"\n#include "faults.h"',
        sources=[
            beside(f"{name}.c") for name in [*SOURCES, *(["faults"] if with_faults() else [])]
        ],
        include_dirs=[beside("")],
        depends=[beside(name) for name in ("aiozc.h", "internal.h", "uring.h", "faults.h")],
        extra_compile_args=[*compile_args, *cflags, f"-DAZC_LIBURING_VERSION={version}"],
        extra_link_args=[*libs, *link_args],
    )
    return ffi


def make_fast() -> Extension:
    compile_args, link_args = flags()
    return Extension(
        "aiozc._fast",
        sources=[beside(f"fast/{name}.c") for name in FAST],
        include_dirs=[beside("")],
        depends=[beside(name) for name in ("aiozc.h", "fast/fast.h")],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


ffibuilder = make()
fast = make_fast()

if __name__ == "__main__":
    os.chdir(ROOT)
    verbose = bool(os.environ.get("AIOZC_VERBOSE"))
    ffibuilder.compile(tmpdir=str(ROOT), verbose=verbose)
    build = Distribution({"name": "aiozc", "ext_modules": [fast]}).get_command_obj("build_ext")
    build.inplace = build.force = True
    build.build_temp = f"build/fast-{sys.implementation.cache_tag}"
    build.ensure_finalized()
    build.run()
