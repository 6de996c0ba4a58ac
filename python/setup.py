# SPDX-License-Identifier: Apache-2.0
"""Says which wheels this package makes: with libfanin inside, for one platform and any Python."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

has_library = (Path(__file__).parent / "fanin" / "lib" / "libfanin.so.0").exists()


class PlatformDistribution(Distribution):
    """The library is not a Python extension, but no less tied to the platform."""

    def has_ext_modules(self) -> bool:
        return has_library


class AnyPythonWheel(bdist_wheel):
    """The library is called through ctypes: no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": AnyPythonWheel})
