"""Adds the native module to what pyproject.toml declares.

Called by setuptools only. AIOZC_NO_EXT=1 leaves the native module out: the Makefile installs the
working tree that way, and builds the module in place by `_native/build.py`.
"""

import os

from setuptools import setup

native = [] if os.environ.get("AIOZC_NO_EXT") == "1" else ["_native/build.py:ffibuilder"]

setup(cffi_modules=native)
