#!/usr/bin/env bash
# CPython's own asyncio tests on both backends.
#
#     scripts/conformance.sh PYTHON [MODULE...]        e.g. .venv/bin/python test_streams
#
# The runner is not part of this repository: AIOZC_SUITES names its directory, else one called
# `suites` beside the working tree (at most one folder deep) is used. Without it, or without the
# interpreter's `test` package, this says so and succeeds. Called by `make full` and .ci/run.
set -euo pipefail

python=$(realpath -s "$1")
shift
cd "$(dirname "$0")/.."

suites=
for directory in ${AIOZC_SUITES:+"$AIOZC_SUITES"} ../suites ../*/suites; do
    if [ -f "$directory/run_cpython.py" ]; then
        suites=$(realpath "$directory")
        break
    fi
done
if [ -z "$suites" ]; then
    echo "conformance: left out, no suites here (AIOZC_SUITES names their directory)"
    exit 0
fi
if ! "$python" -c 'import test.test_asyncio' 2>/dev/null; then
    echo "conformance: left out, this interpreter came without its test package"
    exit 0
fi

status=0
for backend in uring epoll; do
    if ! AIOZC_BACKEND=$backend "$python" -c 'import aiozc; aiozc.new_event_loop().close()'; then
        echo "conformance: $backend cannot be used on this machine"
        status=1
        continue
    fi
    echo "conformance: CPython's asyncio tests, $backend backend"
    (cd "$suites" && AIOZC_BACKEND=$backend PYTHONDONTWRITEBYTECODE=1 "$python" run_cpython.py \
        --python "$python" --loop aiozc:new_event_loop \
        --leave-out-file lists/cpython-private.txt ${1:+--modules "$@"}) || status=1
done
exit $status
