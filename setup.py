"""Builds the native kernels, a plain C library inside mirrorquant/packing/kernels; the rest is in pyproject.toml.

The kernels are optional: where they cannot be compiled the package installs without them, and packed layers run in
plain torch. Why is told in one line, which ``pip -v`` shows; ``mirrorquant kernels`` tells what there is.
"""

import contextlib
import platform
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/mirrorquant/packing/kernels/csrc")
PATHS = {  # the instructions that each source file may use
    "path_avx2.c": ["-mavx2", "-mfma"],
    "path_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vpopcntdq", "-mfma"],
}
# No contraction to fused multiply-adds: an epilogue rounds the same on every path.
FLAGS = ["-O3", "-g0", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]


class BuildKernels(build_ext):
    """Compiles each path with its own instructions; the result is a shared library without any Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except Exception as error:
            print(
                f"mirrorquant: native kernels are not built ({type(error).__name__}: {error});"
                " packed layers will run in plain torch",
                file=sys.stderr,
            )

    def copy_extensions_to_source(self) -> None:
        with contextlib.suppress(OSError):  # not built, as build_extension said
            super().copy_extensions_to_source()

    def _build(self, ext: Extension) -> None:
        flags = [*FLAGS, *self._supported(["-fopenmp"])]
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        paths = {name: options for name, options in PATHS.items() if is_x86 and self._supported(options)}
        macros = [(f"MQ_HAVE_{Path(name).stem.split('_')[1].upper()}", "1") for name in paths]
        objects = []
        for source in ext.sources:
            name = Path(source).name
            if name in PATHS and name not in paths:
                continue
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, macros=macros, extra_postargs=[*flags, *paths.get(name, [])]
            )
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        openmp = [flag for flag in flags if flag == "-fopenmp"]
        self.compiler.link_shared_object(objects, target, libraries=["m"], extra_postargs=openmp)

    def _supported(self, flags: list[str]) -> list[str]:
        """The flags, if the compiler takes them; else none."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "try.c"
            source.write_text("int main(void) { return 0; }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
                self.compiler.link_executable(objects, "try", output_dir=folder, extra_postargs=flags)
            except Exception:
                return []
        return flags


setup(
    ext_modules=[
        Extension(
            "mirrorquant.packing.kernels._kernels",
            sources=[str(SOURCES / name) for name in ("api.c", "path_portable.c", "path_avx2.c", "path_avx512.c")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
