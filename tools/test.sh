#!/usr/bin/env bash
# Everything that has to hold: lint, format, types, and the tests against the installed wheel.
#
#   bash tools/test.sh            all of it, as CI runs it
#   bash tools/test.sh -k plan    further words go to pytest
#
# Needs Python 3.11 or newer and a package index. It builds the wheel, installs it (not -e) into the venv .venv-test,
# made empty whenever the dependencies in pyproject.toml changed, and runs the tests that need no torch on every other
# Python 3.11 to 3.14 found on PATH or in ~/.pyenv/versions, each in a venv of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

# The stages before the loader: these import and work without torch.
torch_free=(
    tests/verdict tests/doctor/test_records.py tests/doctor/test_kernel_looks.py
    tests/plan tests/sources tests/pack tests/read tests/report tests/repack tests/export tests/cli tests/test_chunks.py tests/test_compare.py
    tests/test_decode.py tests/test_fitting.py tests/test_format.py
    tests/test_image_header.py tests/test_info.py tests/test_jpeg_scan.py tests/test_order_measures.py
    tests/test_compare_stored.py tests/test_filters.py tests/test_info_stored.py tests/test_jpeg_rows.py
    tests/test_long_reads.py tests/test_open_readers.py tests/test_store_check.py
    tests/test_preview_stored.py tests/test_stored_rows.py tests/test_stored_samples.py tests/test_verify_stored.py
    tests/estimate tests/test_nasty.py tests/test_page_cache.py tests/test_pairs.py
    tests/meter/test_gpus.py tests/meter/test_sampler.py tests/meter/test_stats.py tests/meter/test_steps.py
    tests/test_turns.py tests/test_stopwatch.py tests/test_preview.py tests/test_quality.py tests/test_sixteen_bits.py tests/test_verify.py
    tests/tune/test_choose.py
)

# An environment from outside must not decide what is imported.
unset PYTHONPATH PYTHONHOME
# Nothing is imported from the current folder or a script's folder: only what is installed.
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# OpenMP threads that spin while they wait starve each other as soon as anything else wants the cores: with neighbours
# on both cores a training step took 7 times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# A venv "$1" made with interpreter "$2" that holds the requirements "$3..."; as it is when they are the same as before.
ensure_venv() {
    local venv=$1 interpreter=$2 stamp
    shift 2
    stamp=$({ "$interpreter" -VV; printf '%s\n' "$@"; cat tools/constraints.txt; } | sha256sum)
    if [[ "$(cat "$venv/stamp" 2>/dev/null || true)" != "$stamp" ]]; then
        rm -rf "$venv"
        "$interpreter" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet -c tools/constraints.txt "$@" || return 1
        printf '%s\n' "$stamp" >"$venv/stamp"
    fi
}

# The wheel into venv "$1", in place of what was there; its dependencies are there already, or absent on purpose.
install_wheel() {
    "$1/bin/python" -m pip install --quiet --no-deps --force-reinstall dist/test/fastload-*.whl
    "$1/bin/python" - "$PWD/$1" <<'PYTHON'
import sys
from pathlib import Path

import fastload

home = Path(fastload.__file__).resolve()
if not home.is_relative_to(Path(sys.argv[1]).resolve()):
    sys.exit(f"the tests would run {home}, not the wheel installed in {sys.argv[1]}")
PYTHON
}

python=$(find_python "${PYTHON:-}")
say "environment for $("$python" -V) in .venv-test"
mapfile -t core < <(requirements "$python" core)
mapfile -t dev < <(requirements "$python" dev)
mapfile -t test_core < <(requirements "$python" test-core)
ensure_venv .venv-test "$python" torch "${core[@]}" "${dev[@]}"
bin=.venv-test/bin

say "build the wheel"
rm -rf dist/test
mkdir -p dist/test
"$bin/python" -m build --wheel --outdir dist/test . >dist/test/build.log 2>&1 || { cat dist/test/build.log; exit 1; }
install_wheel .venv-test
# Its declared dependencies are met by what is installed: pip check reads the wheel's own metadata.
"$bin/python" -m pip check

say "ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .

say "mypy --strict"
"$bin/mypy" --strict fastload
[[ ! -d tests/typing ]] || "$bin/mypy" --strict tests/typing

# What needs no torch, on every other Python, one after the other; exit code 1 if a test failed on any.
other_pythons() {
    local seen candidate version venv failed=()
    seen=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    for candidate in python3.11 python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/*/bin/python; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case " $seen " in *" $version "*) continue ;; esac
        case $version in 3.11 | 3.12 | 3.13 | 3.14) ;; *) continue ;; esac
        seen+=" $version"
        say "tests without torch on Python $version"
        venv=.venv-test-$version
        if ! ensure_venv "$venv" "$candidate" "${core[@]}" "${test_core[@]}"; then
            echo "SKIPPED: Python $version cannot install the dependencies (pip's reason above)"
            continue
        fi
        install_wheel "$venv" || return 1
        # The laws of numbers were looked at with more examples on the first Python: here they have to run.
        FASTLOAD_EXAMPLES=10 FASTLOAD_TESTED_PREFIX="$PWD/$venv" "$venv/bin/pytest" -q -p no:cacheprovider -m "not slow and not gpu" \
            "${torch_free[@]}" </dev/null || failed+=("$version")
    done
    if ((${#failed[@]})); then
        echo "FAILED on Python: ${failed[*]}"
        return 1
    fi
}

# Beside the main run, which leaves a core free much of the time: the other Pythons, then what mostly waits for
# processes that it starts. What they say comes at the end.
beside=(tests/bench tests/ddp tests/test_gpu_benchmark.py tests/test_readme.py tests/test_tools.py)

run_beside() {
    local code=0 status=0
    other_pythons || code=1
    say "tests beside the main run"
    FASTLOAD_TESTED_PREFIX="$PWD/.venv-test" "$bin/pytest" -p no:cacheprovider "${beside[@]}" "$@" </dev/null || status=$?
    # 5: the words given choose none of these.
    ((status == 0 || status == 5)) || code=1
    return "$code"
}

beside_log=dist/test/beside.log
run_beside "$@" >"$beside_log" 2>&1 &
job=$!
trap 'kill "$job" 2>/dev/null || true' EXIT

say "all other tests against the wheel"
failed=0 status=0
FASTLOAD_TESTED_PREFIX="$PWD/.venv-test" "$bin/pytest" "${beside[@]/#/--ignore=}" "$@" </dev/null || status=$?
((status == 0 || (status == 5 && $# > 0))) || failed=1
wait "$job" || failed=1
cat "$beside_log"
if ((failed)); then
    echo "FAILED: see above" >&2
    exit 1
fi
