"""The version, in one place. Read by setuptools and by the package."""

__version__ = "0.1.0"
