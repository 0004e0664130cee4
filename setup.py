"""Builds libmok with CMake and puts it into the package. Nothing is compiled against PyTorch or Python, so the wheel serves every version of both.
Kernels for GPUs are compiled if nvcc is found (MOK_CUDA=OFF or ON in the environment decides otherwise)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r"project\(mok VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
BUILD = "build-pip"


class BuildWithLibrary(build_py):
    def run(self):
        shutil.rmtree(Path(self.build_lib) / "mok", ignore_errors=True)
        super().run()
        if not self.editable_mode:
            self.build_library(Path(self.build_lib) / "mok")

    def build_library(self, package: Path) -> None:
        folder = ROOT / BUILD / "cmake"
        options = ["-DMOK_TESTS=OFF", "-DMOK_CLI=OFF", "-DMOK_WERROR=OFF", f"-DMOK_CUDA={os.environ.get('MOK_CUDA', 'AUTO')}"]
        configured = subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *options], check=True, stdout=subprocess.PIPE, text=True).stdout
        sys.stdout.write(configured)
        subprocess.run(["cmake", "--build", str(folder), "--target", "mok", "--parallel", str(os.cpu_count() or 1)], check=True)
        without = re.search(r"cuda: (built without .*)", configured)
        print(f"mok: libmok {VERSION}: backend cpu" + (f"; no backend cuda: {without.group(1)}" if without else " and cuda"), flush=True)
        shutil.copy2((folder / "libmok.so").resolve(), package / "libmok.so")
        shutil.copy2(ROOT / "include" / "mok.h", package / "mok.h")


class PlatformWheel(bdist_wheel):
    """For this kind of machine, and any Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return True


setup(
    version=VERSION,
    distclass=WithLibrary,
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    options={"build": {"build_base": BUILD}, "egg_info": {"egg_base": "python"}},
    setup_requires=[] if shutil.which("cmake") else ["cmake>=3.18"],
)
