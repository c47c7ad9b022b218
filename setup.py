"""Adds the native modules to what pyproject.toml declares.

Called by setuptools only. AIOZC_NO_EXT=1 leaves them out: the Makefile installs the working tree that
way, and builds them in place by `_native/build.py`.
"""

import os
import runpy

from setuptools import setup

if os.environ.get("AIOZC_NO_EXT") == "1":
    setup()
else:
    fast = runpy.run_path("_native/build.py")["fast"]
    setup(cffi_modules=["_native/build.py:ffibuilder"], ext_modules=[fast])
