#!/bin/sh
# Builds the liburing that wheels have inside, as a static library that may go into a shared one:
#   wheel_liburing.sh PREFIX
# Called by cibuildwheel (before-all in pyproject.toml) within the images of manylinux and musllinux, whose
# distributions have no liburing, an old one, or no liburing.a. Not used where liburing-dev is there: the
# static library of Debian's will do. LIBURING_GIT names another place to take the same commit from.
set -eu

prefix=${1:?usage: wheel_liburing.sh PREFIX}
version=2.15
commit=d41bf9220ec39277ff235379e9089d9e0fd6c2a5 # the tag may be moved, this cannot
from=${LIBURING_GIT:-https://github.com/axboe/liburing.git}

if command -v apk >/dev/null 2>&1; then
    apk add --no-cache git make linux-headers pkgconf
elif command -v dnf >/dev/null 2>&1; then
    dnf -y install git make pkgconf-pkg-config
fi

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git -C "$source" init -q
git -C "$source" fetch -q --depth 1 "$from" "$commit"
git -C "$source" checkout -q FETCH_HEAD
[ "$(git -C "$source" rev-parse HEAD)" = "$commit" ] || { echo "not the commit of $version" >&2; exit 1; }

cd "$source"
./configure --prefix="$prefix" >configure.out || { cat configure.out; exit 1; }
make -s -C src ENABLE_SHARED=0 CFLAGS="-O2 -fPIC -fvisibility=hidden" install
make -s liburing.pc
install -D -m 644 LICENSE "$prefix/share/licenses/liburing/LICENSE"
install -D -m 644 liburing.pc "$prefix/lib/pkgconfig/liburing.pc"
echo "liburing $version in $prefix"
