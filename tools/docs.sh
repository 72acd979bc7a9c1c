#!/usr/bin/env bash
# Builds docs/ as a static site with the API reference, into dist/docs. Warnings are errors.
#
#   bash tools/docs.sh            then open dist/docs/index.html
#
# Needs Python 3.11 or newer and a package index. It installs what it needs into the venv .venv-docs, made empty
# whenever those requirements changed; PYTHON=/path/to/python chooses the interpreter. With DOCS_PYTHON it uses that
# one, which has them already, as tools/test.sh does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

unset PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [[ -z ${DOCS_PYTHON:-} ]]; then
    python=$(find_python "${PYTHON:-}")
    mapfile -t core < <(requirements "$python" core)
    mapfile -t docs < <(requirements "$python" docs)
    ensure_venv .venv-docs "$python" torch "${core[@]}" "${docs[@]}"
    DOCS_PYTHON=.venv-docs/bin/python
fi

rm -rf dist/docs
# The docstrings are those of this checkout; every problem is shown before it ends with exit code 1.
PYTHONPATH=$PWD "$DOCS_PYTHON" -m sphinx -b html -W --keep-going -E -q -d dist/docs-cache docs dist/docs
rm -rf dist/docs-cache
echo "built dist/docs/index.html"
