"""One contestant of the benchmarks: one service on one event loop, in a process of its own.

Run by harness/process.py as `python -m contestant LOOP SERVICE ...`, with the interpreter under test.
It measures no network row itself, and must stay free of imports that the contestant does not need:
the libraries of harness/ are not required in that interpreter.
"""
