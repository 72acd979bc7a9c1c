#!/usr/bin/env bash
# Everything that has to hold: lint, format, types, docs, and the tests against the installed wheel.
#
#   bash tools/test.sh            all of it, as CI runs it
#   bash tools/test.sh -k plan    further words go to pytest
#
# Needs Python 3.11 or newer and a package index. It builds the wheel, installs it (not -e) into the venv .venv-test,
# made empty whenever the dependencies in pyproject.toml changed, and runs tests that need no torch on the other
# Pythons 3.11 to 3.14 found on PATH or in ~/.pyenv/versions, each in a venv of its own: most on the newest, few on others.
# Each test that was skipped is listed at the end with its reason; where FASTLOAD_MAY_SKIP is set (.ci/run), it fails
# unless the reason is among those.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

# What other Pythons run, where it works without torch: every command, and each stage that reads or writes bytes. Which
# advice and hints commands print depends on no Python. Of the sources those that lean on Python's own library: archives, XML, CSV, and the layouts of folders.
torch_free=(
    tests/cli --ignore=tests/cli/test_advice.py --ignore=tests/cli/test_hints.py --ignore=tests/cli/test_live.py tests/format tests/images tests/pack/test_golden_bytes.py tests/pack/test_pack.py tests/plan tests/read
    tests/options tests/sources/test_{archives,folder,hdf5,imagenet,layouts,manifest,npy,raw_rows,tree,voc,webdataset}.py
    tests/system tests/timing
)

# An environment from outside must not decide what is imported.
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
# Nothing is imported from the current folder or a script's folder: only what is installed.
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# OpenMP threads that spin while they wait starve each other as soon as anything else wants the cores: with neighbours
# on both cores a training step took 7 times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# The wheel into venv "$1", in place of what was there; its dependencies are there already, or absent on purpose.
install_wheel() {
    install_into "$1" --no-deps --force-reinstall dist/test/fastload_hdf5-*.whl
    "$1/bin/python" - "$PWD/$1" <<'PYTHON'
import sys
from pathlib import Path

import fastload

home = Path(fastload.__file__).resolve()
if not home.is_relative_to(Path(sys.argv[1]).resolve()):
    sys.exit(f"the tests would run {home}, not the wheel installed in {sys.argv[1]}")
PYTHON
}

# The environment of the first Python.
environment() {
    ensure_venv .venv-test "$python" torch "${core[@]}" "${dev[@]}" "${docs[@]}" || return 1
    # Not beside the others: Ray and more look for torchvision, and fail where its build is for CUDA and torch's for CPUs.
    [[ -d .venv-test/torchvision ]] ||
        install_into .venv-test --no-deps -c tools/constraints.txt --target .venv-test/torchvision torchvision ||
        echo "torchvision cannot be installed: the tests of its datasets are skipped"
}

# The other Pythons 3.11 to 3.14 that are found: lines of version and interpreter, the newest first.
find_others() {
    local seen candidate version
    declare -A interpreters=()
    seen=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    for candidate in python3.11 python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/*/bin/python; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in "$seen") continue ;; 3.11 | 3.12 | 3.13 | 3.14) interpreters[$version]=${interpreters[$version]:-$candidate} ;; esac
    done
    for version in $(printf '%s\n' "${!interpreters[@]}" | sort -rV); do
        printf '%s %s\n' "$version" "${interpreters[$version]}"
    done
}

# On the newest other Python most of what needs no torch, on those between what packs and reads a file.
other_pythons() {
    local other version venv chosen_tests=("${torch_free[@]}") failed=()
    # They have the package's own dependencies and no more.
    [[ -z ${FASTLOAD_MAY_SKIP+set} ]] || local -x FASTLOAD_MAY_SKIP="$FASTLOAD_MAY_SKIP"$'\nis not installed\ncould not import'
    for other in "${others[@]}"; do
        version=${other%% *} venv=.venv-test-${other%% *}
        say "tests without torch on Python $version"
        if ! ensure_venv "$venv" "${other#* }" "${core[@]}" "${test_core[@]}"; then
            echo "SKIPPED: Python $version cannot install the dependencies (the reason above)"
            continue
        fi
        install_wheel "$venv" || return 1
        # The laws of numbers are looked at with more examples on the first Python: here they have to run.
        FASTLOAD_EXAMPLES=3 FASTLOAD_TESTED_PREFIX="$PWD/$venv" "$venv/bin/pytest" -q -p no:cacheprovider \
            -m "not slow and not gpu" "${chosen_tests[@]}" </dev/null || failed+=("$version")
        chosen_tests=(tests/cli/test_main.py tests/pack/test_golden_bytes.py tests/read)
    done
    if ((${#failed[@]})); then
        echo "FAILED on Python: ${failed[*]}"
        return 1
    fi
}

# The tests against the wheel: the words go to pytest. Exit code 5, no test chosen, is an error only where no words choose.
tests_of() {
    local status=0
    FASTLOAD_TESTED_PREFIX="$PWD/.venv-test" "$bin/pytest" -p no:cacheprovider "$@" </dev/null || status=$?
    ((status == 0 || (status == 5 && chosen > 0)))
}

types() { "$bin/mypy" --strict fastload tests/typing; }

# The site, and then the tests that look at it among others.
site_and_tools() {
    local code=0
    DOCS_PYTHON=$bin/python bash tools/docs.sh || code=1
    FASTLOAD_SITE="$PWD/dist/docs" tests_of tests/tools "$@" || code=1
    return "$code"
}

# Jobs run beside each other, or the cores would idle while a test waits; when one ends, the next begins.
at_once=5
declare -A running=()  # process -> the job's name, which is also that of its log
failed=()
TIMEFORMAT=$'\n%0lR; CPU-seconds: %0U, and %0S of the system'

# Begins the job "$1", the command "$2...", as soon as fewer than `at_once` run.
begin() {
    while ((${#running[@]} >= at_once)); do end_one; done
    { time "${@:2}"; } >"$logs/$1.log" 2>&1 &
    running[$!]=$1
}

# Waits until a job ends, and shows what it said.
end_one() {
    local ended code=0
    wait -n -p ended "${!running[@]}" || code=$?
    ((code == 0)) || failed+=("${running[$ended]}")
    say "${running[$ended]}"
    cat "$logs/${running[$ended]}.log"
    unset "running[$ended]"
}

chosen=$#
bin=.venv-test/bin
logs=dist/test
rm -rf "$logs"
mkdir -p "$logs"
trap '((! ${#running[@]})) || kill "${!running[@]}" 2>/dev/null || true' EXIT

python=$(find_python "${PYTHON:-}")
mapfile -t core < <(requirements "$python" core)
mapfile -t dev < <(requirements "$python" dev)
mapfile -t docs < <(requirements "$python" docs)
mapfile -t test_core < <(requirements "$python" test-core)
mapfile -t others < <(find_others)

# To install keeps one core busy. Meanwhile the other one builds the wheel, and runs it on the other Pythons.
say "environment for $("$python" -V) in .venv-test, and beside it the wheel and the other Pythons"
ensure_uv "$python"  # once, before two jobs want it
begin environment environment
environment_job=$!
ensure_venv .venv-build "$python" build 'hatchling>=1.26'
.venv-build/bin/python -m build --wheel --no-isolation --outdir dist/test . >"$logs/build.log" 2>&1 || { cat "$logs/build.log"; exit 1; }
begin "other Pythons" other_pythons
wait "$environment_job" || { cat "$logs/environment.log"; exit 1; }
unset "running[$environment_job]"
grep "^torchvision" "$logs/environment.log" || true
install_wheel .venv-test
# Compiled once: runs that begin at the same time would each do it, for 7 s of a core.
"$bin/python" -c "import torch._dynamo, hypothesis, matplotlib.pyplot, pytest, fastload.loader.loader"
# Its declared dependencies are met by what is installed: that reads the wheel's own metadata.
.venv-uv/bin/uv pip check --python "$bin/python"

say "ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .

# The longest first, so that all cores are busy until the end. A line is one run of pytest: folders whose tests share what
# takes seconds to make, as Triton's interpreter, are in one.
runs=(
    "tests/prefetch tests/transforms"
    "tests/remote tests/test_shards.py"
    "tests/profiling"
    "tests/pack"
    "tests/faults"
    "tests/loader"
    "tests/benchmarks tests/distributed"
    "tests/cli tests/sources"
    "tests/export tests/inspection tests/repack tests/test_readme.py"
)
read -ra named <<<"${runs[*]} tests/tools"
say "types, docs and tests against the wheel, $at_once at a time"
begin "docs, and tests of tools" site_and_tools "$@"
begin "mypy" types
for folders in "${runs[@]}"; do
    read -ra chosen_tests <<<"$folders"
    begin "${folders//\//-}" tests_of "${chosen_tests[@]}" "$@"
done
begin "tests" tests_of "${named[@]/#/--ignore=}" "$@"
while ((${#running[@]})); do end_one; done
say "skipped"
grep -h "^SKIPPED" "$logs"/*.log | sort -k 3 || true
say "done"
times  # of the shell, then of all that it ran: CPU time of their own, and of the system
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
