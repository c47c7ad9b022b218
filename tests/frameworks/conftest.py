"""Gives the tests here the fixture of children.py; the fixtures of tests/conftest.py are theirs as well."""

from children import serve as serve
