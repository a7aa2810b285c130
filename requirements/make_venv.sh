#!/usr/bin/env bash
# make_venv.sh VENV [PYTHON]: creates VENV with Python 3.11 or 3.12 unless it is there and works.
set -euo pipefail

venv=$1
wanted=${2:-}

usable() { # exists, really starts (a version manager's shim may not), and has the right version
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

if usable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

python=""
for candidate in ${wanted:-python3.12 python3.11 python3}; do
    if usable "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: no Python 3.11 or 3.12 found (tried: ${wanted:-python3.12 python3.11 python3})." >&2
    echo "Install one (Debian 12: apt-get install python3 python3-venv; Ubuntu 24.04: the same)," >&2
    echo "or name it: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "error: $python has no venv module. Install it: apt-get install python$version-venv" >&2
    exit 1
fi
echo "creating $venv with Python $version"
"$python" -m venv --clear "$venv"
