"""`python -m aiozc.cli.bench.sender JOB`: the process that is measured. One job, one answer, and it ends.

Started by run.py, if need be inside a network namespace. JOB is a Job as JSON; the answer, on standard
output, is a Result as JSON, or {"failed": why}.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import sys

from aiozc.cli.bench import bare, engine, sockets
from aiozc.cli.bench.errors import RowFailed
from aiozc.cli.bench.job import Job


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    sockets.pin(job.cpu)
    try:
        result = bare.run(job) if job.engine == "bare" else engine.run(job)
        answer = dataclasses.asdict(result)
    except (RowFailed, OSError) as error:
        answer = {"failed": str(error) or type(error).__name__}
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            answer["failed"] += ": raise RLIMIT_MEMLOCK (ulimit -l)"
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
