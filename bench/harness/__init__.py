"""The measuring side of the benchmarks: rows, processes, counters, rounds and what is shown of them.

The fronts are peers.py (all rows) and echo.py (echo rows of one's own choice). What is measured runs in
processes of its own: contestant/ (the event loops), the C clients, and
the floors, echo_floor.c and push_floor.c, with floor.c.
"""
