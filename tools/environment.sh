# Shell functions that demo.sh, docs.sh and test.sh share. Sourced, not run.
# shellcheck shell=bash

# Whether "$1" runs and is Python 3.11 or newer; pyenv leaves shims for versions that it then refuses to run.
is_new_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# The interpreter to use: "$1" when given, else the first of the usual names that is 3.11 or newer.
find_python() {
    local candidate
    for candidate in ${1:+"$1"} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if is_new_python "$candidate"; then
            command -v "$candidate"
            return
        fi
        if [[ -n ${1:-} ]]; then
            echo "$1 is not a working Python 3.11 or newer" >&2
            return 1
        fi
    done
    echo "no Python 3.11 or newer found; name one with PYTHON=/path/to/python" >&2
    return 1
}

# A hash over the names and contents of the files and folders given, caches left out.
inputs_hash() {
    find "$@" -type f -not -name '*.pyc' -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z |
        xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
}

# Requirements of pyproject.toml, one a line, by interpreter "$1": "core" (the package's own, without torch),
# or the name of a dependency group. pip knows groups only from 25.1 on, and venv brings older ones.
requirements() {
    "$1" - "$2" <<'PYTHON'
import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)


def group(name):
    for entry in project["dependency-groups"][name]:
        if isinstance(entry, dict):
            yield from group(entry["include-group"])
        else:
            yield entry


if sys.argv[1] == "core":
    wanted = [entry for entry in project["project"]["dependencies"] if re.match(r"[\w-]+", entry)[0] != "torch"]
else:
    wanted = list(group(sys.argv[1]))
print("\n".join(wanted))
PYTHON
}

# Has uv in .venv-uv, brought by the pip of interpreter "$1", and tells it where pip's settings look for packages.
ensure_uv() {
    local listed setting variable value
    [[ -x .venv-uv/bin/uv ]] || { "$1" -m venv .venv-uv && .venv-uv/bin/python -m pip install --quiet 'uv>=0.9'; } || return 1
    [[ -z ${UV_INDEX_STRATEGY:-} ]] || return 0
    listed=$(.venv-uv/bin/python -m pip config list)
    for setting in index-url=UV_DEFAULT_INDEX extra-index-url=UV_INDEX find-links=UV_FIND_LINKS cert=SSL_CERT_FILE; do
        variable=${setting#*=}
        # Variables come first there, as pip prefers them to its files; several values are apart by spaces or lines.
        value=$(sed -n "s/^[^.]*\.${setting%=*}='\(.*\)'\$/\1/p" <<<"$listed" | sed -n '1{s/\\n/ /g;s/^ *//;p}')
        [[ $variable != UV_FIND_LINKS ]] || value=${value// /,}
        [[ -z $value || -n ${!variable:-} ]] || export "$variable=$value"
    done
    # As pip: the newest release, whichever index has it.
    export UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

# Installs into venv "$1" by uv, which takes a fifth of pip's time; where it fails pip tries. Neither compiles all
# 14,000 modules: Python does so with what is imported, when it is.
install_into() {
    .venv-uv/bin/uv pip install --quiet --python "$1/bin/python" "${@:2}" || {
        echo "uv could not install that (above): pip tries"
        .venv-uv/bin/python -m pip --python "$1/bin/python" install --quiet --no-compile "${@:2}"
    }
}

# A venv "$1" made with interpreter "$2" that holds the requirements "$3..."; as it is when they are the same as before.
# It has no pip.
ensure_venv() {
    local venv=$1 interpreter=$2 stamp
    shift 2
    ensure_uv "$interpreter" || return 1
    stamp=$({ "$interpreter" -VV; printf '%s\n' "$@"; cat tools/constraints.txt; } | sha256sum)
    if [[ "$(cat "$venv/stamp" 2>/dev/null || true)" != "$stamp" ]]; then
        rm -rf "$venv"
        "$interpreter" -m venv --without-pip "$venv"
        install_into "$venv" -c tools/constraints.txt "$@" || return 1
        printf '%s\n' "$stamp" >"$venv/stamp"
    fi
}
