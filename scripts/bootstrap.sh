#!/usr/bin/env bash
# Sees to what the build needs from the system: a C compiler, pkg-config, liburing's headers, and an
# interpreter with its headers and venv.
#
#     [PYTHON=python3] scripts/bootstrap.sh [COMMAND...]
#
# COMMANDs are further programs that are wanted, named like their Debian packages (clang-format).
# Run by the Makefile before each build and by .ci/run. Looks first, and does nothing when all is
# there; else root gets the missing Debian packages installed and anybody else is told the command.
set -euo pipefail

python=${PYTHON:-python3}

say() { printf 'bootstrap: %s\n' "$*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }

# Every line: a Debian package that is missing.
missing_packages() {
    has gcc || echo gcc
    # gcc alone comes without the C library's headers on a minimal Debian.
    echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || echo libc6-dev
    has pkg-config || echo pkg-config
    pkg-config --exists liburing 2>/dev/null || echo liburing-dev
    local command
    for command in "$@"; do
        has "$command" || echo "$command"
    done
    python_packages
}

# The system's interpreter gets its parts from packages; another one (pyenv, a build of one's own)
# brings them itself.
python_packages() {
    has "$python" || { [ "$python" = python3 ] && echo python3 python3-dev python3-venv; return 0; }
    "$python" - <<'PY'
import os
import sys
import sysconfig

def usable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True

lacking = []
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    lacking.append("dev")
if not (usable("venv") and usable("ensurepip")):
    lacking.append("venv")
of_the_system = os.path.realpath(sys.executable).startswith("/usr/bin/")
default = os.path.realpath("/usr/bin/python3") == os.path.realpath(sys.executable)
name = "python3" if default else "python%d.%d" % sys.version_info[:2]
for part in lacking:
    print("%s-%s" % (name, part) if of_the_system else "!%s" % part)
PY
}

check_version() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "aiozc needs Python 3.11 or newer, and $python is $("$python" -V 2>&1);" \
            "choose another one: make PYTHON=/path/to/python3.12"
        exit 1
    }
}

[ "$(uname -s)" = Linux ] || { say "aiozc runs on Linux only"; exit 1; }
if has "$python"; then
    check_version
elif [ "$python" != python3 ]; then
    say "there is no interpreter $python"
    exit 1
fi

packages=$(missing_packages "$@" | tr ' ' '\n' | sort -u)
[ -n "$packages" ] || exit 0

if grep -q '^!' <<<"$packages"; then
    say "$("$python" -c 'import sys; print(sys.executable)') lacks its headers or its venv module;" \
        "reinstall it with them, or choose another one: make PYTHON=/path/to/python"
    exit 1
fi

install=(apt-get install -y --no-install-recommends $packages)
if ! has apt-get; then
    say "missing, named as in Debian: ${packages//$'\n'/ }"
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    say "missing packages; install them with:"
    say "  sudo ${install[*]}"
    exit 1
fi
say "installing ${packages//$'\n'/ }"
export DEBIAN_FRONTEND=noninteractive
# The lists of a fresh machine are empty, and old ones name packages that are gone.
"${install[@]}" >&2 || { apt-get update >&2 && "${install[@]}" >&2; }
check_version
