"""Adds to pyproject.toml the native modules, the licence of a liburing inside, and README as an index shows it.

Called by setuptools only. AIOZC_NO_EXT=1 leaves the modules out: the Makefile installs the working tree that
way, and builds them in place by `_native/build.py`; an sdist needs none of them, nor liburing.
"""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, setup

LICENCE = Path("licenses/liburing.txt")  # made here from the system's, never in the tree's history


class Described(Distribution):
    """README's links into the tree lead nowhere from an index."""

    def parse_config_files(self, *args, **kwargs):
        super().parse_config_files(*args, **kwargs)
        self.metadata.long_description = runpy.run_path("scripts/index_readme.py")["readme"]()


class WithLicence(Described):
    """pyproject.toml can only name files that are always there."""

    def parse_config_files(self, *args, **kwargs):
        super().parse_config_files(*args, **kwargs)
        self.metadata.license_files = [*self.metadata.license_files, str(LICENCE)]


if os.environ.get("AIOZC_NO_EXT") == "1":
    setup(distclass=Described)
else:
    build = runpy.run_path("_native/build.py")
    # Anew each time: what the environment changes, liburing's place above all, changes no file's date.
    told = {"distclass": Described, "options": {"build_ext": {"force": True}}}
    if build["static"]():
        LICENCE.parent.mkdir(exist_ok=True)
        shutil.copyfile(build["licence"](), LICENCE)
        told["distclass"] = WithLicence
    setup(cffi_modules=["_native/build.py:ffibuilder"], ext_modules=[build["fast"]], **told)
