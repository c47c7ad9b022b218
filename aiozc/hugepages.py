"""Whether memory consists of huge pages.

Used by pool.py: a registered region of nothing but huge pages is dearer than memory that is not registered, by
a factor of ten and more (_native/pages.c says why). Reads what the kernel tells of the process; where that
cannot be read, nothing is huge.
"""

from __future__ import annotations

import re

HUGE = 2 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_KINDS = (
    "AnonHugePages:",
    "ShmemPmdMapped:",
    "FilePmdMapped:",
    "Shared_Hugetlb:",
    "Private_Hugetlb:",
)


def all_huge(address: int, size: int) -> bool:
    """Are there as many huge pages in the mappings of this memory as it would take? That they are its own is
    not asked: to send unregistered what might have been registered costs little."""
    if size < HUGE:
        return False
    found, inside = 0, False
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                if line.startswith(_KINDS):
                    found += int(line.split()[1]) * 1024 if inside else 0
                elif mapping := _MAPPING.match(line):
                    start, end = (int(part, 16) for part in mapping.groups())
                    inside = start < address + size and address < end
    except OSError:
        return False
    return found >= size
