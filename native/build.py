"""The ffibuilder of `native._native`; the interface is native.h, read as it is."""

from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "native.h"
RELAY = ["relay", "relay_worker", "relay_pair", "relay_dial", "relay_pipe"]
SOURCES = ["native/hostpath.c", "native/kvm_probe.c", *(f"native/{name}.c" for name in RELAY)]

ffibuilder = FFI()
ffibuilder.cdef(HEADER.read_text(encoding="ascii"))
ffibuilder.set_source(
    "native._native",
    '#include <stdint.h>\n#include "native.h"\n',
    sources=SOURCES,
    depends=["native/native.h", "native/relay.h"],
    include_dirs=["native"],
    extra_compile_args=[
        "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror",
        "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-pthread",
    ],
    extra_link_args=["-pthread", "-Wl,-z,relro,-z,now"],
)
