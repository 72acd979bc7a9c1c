#!/usr/bin/env bash
# From nothing to a trained network and a comparison, in a few minutes on two cores:
#
#   bash tools/demo.sh                      on 5,000 faces that it draws (CelebA layout)
#   bash tools/demo.sh SRC                  on your own folder or archive
#   DEMO_SIZE=128 bash tools/demo.sh SRC    images of several sizes: all brought to 128x128
#
# It makes .venv, installs fastload there, and keeps what it draws and packs in .demo (git ignores both; both are
# reused the next time). PYTHON=/path/to/python chooses the interpreter, DEMO_EPOCHS the epochs (2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

src=${1:-}
size=${DEMO_SIZE:-}
epochs=${DEMO_EPOCHS:-2}
begin=$(date +%s)
mkdir -p .demo

say() { printf '\n== %s\n' "$*"; }

say "install into .venv"
python=$(find_python "${PYTHON:-}")
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
# Built anew only when something that goes into the wheel changed.
stamp=$(inputs_hash pyproject.toml README.md LICENSE tools/constraints.txt fastload)
if [[ "$(cat .venv/fastload.stamp 2>/dev/null || true)" != "$stamp" ]]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt '.[report]'
    printf '%s\n' "$stamp" >.venv/fastload.stamp
fi
# Run what was installed, not the checkout's folder.
export PYTHONSAFEPATH=1
# OpenMP threads that spin while they wait starve each other as soon as anything else wants the cores: with neighbours
# on both cores a training step took 7 times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
py=.venv/bin/python
"$py" -c 'import fastload, sys; print("fastload for Python", sys.version.split()[0], "in", sys.prefix)'

if [[ -z $src ]]; then
    say "draw 5,000 faces"
    "$py" tools/make_faces.py .demo/faces
    src=.demo/faces
fi

packed=.demo/demo.h5
preview=.demo/preview.png
say "fastload pack $src"
options=(--overwrite)
[[ -z $size ]] || options+=(--size "$size" --fit crop)
pack_begin=$(date +%s%N)
.venv/bin/fastload pack "$src" "$packed" "${options[@]}"
pack_ns=$(($(date +%s%N) - pack_begin))

say "fastload info, fastload preview"
.venv/bin/fastload info "$packed"
.venv/bin/fastload preview "$packed" -o "$preview" --overwrite

say "the plain way against FastLoader"
rm -f .demo/compare.json
if [[ -d $src ]]; then
    "$py" tools/compare_plain.py "$src" "$packed" --rounds 3 --json .demo/compare.json
else
    echo "$src is an archive: the plain way would need its files unpacked, so it is not timed"
fi

say "train $epochs epochs, under fastload doctor"
rm -f .demo/doctor.json
if "$py" -c 'import sys, fastload; sys.exit(not {"labels", "masks"} & set(fastload.inspect_file(sys.argv[1]).fields))' "$packed"; then
    # train.py imports what stands beside it in tools/, which is its own folder and not the checkout's.
    env -u PYTHONSAFEPATH .venv/bin/fastload doctor --json .demo/doctor.json --report .demo/report.html --force -- \
        "$py" tools/train.py "$packed" --epochs "$epochs" --batch-size 32 --picture .demo/answers.png |
        tee .demo/train.txt
else
    echo "the images have neither labels nor masks: nothing to train" | tee .demo/train.txt
fi

"$py" - "$packed" "$pack_ns" "$preview" "$(($(date +%s) - begin))" <<'PYTHON'
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import fastload

packed, pack_ns, preview, total_s = sys.argv[1:]
info = fastload.inspect_file(packed)
table = Table(title="fastload demo", show_header=False)
shape = "x".join(str(n) for n in info.fields["images"].shape[1:])
table.add_row("packed", f"{info.num_samples:,} images of {shape} in {packed}, {info.file_bytes / 1e6:,.0f} MB")
table.add_row("packing, start to end", f"{info.num_samples / int(pack_ns) * 1e9:,.0f} images/s")
compare = Path(".demo/compare.json")
if compare.exists():
    rates = json.loads(compare.read_text())
    table.add_row("files + Pillow + DataLoader(num_workers=2)", f"{rates['plain']:,.0f} images/s")
    table.add_row("FastLoader", f"{rates['fastload']:,.0f} images/s, {rates['ratio']:.1f} times as fast")
said = Path(".demo/train.txt").read_text().splitlines()
table.add_row("training", [line for line in said if line.startswith("epoch") or line is said[0]][-1])
doctor = Path(".demo/doctor.json")
if doctor.exists():
    table.add_row("what binds it", json.loads(doctor.read_text())["verdict"]["sentence"])
    table.add_row("report", ".demo/report.html")
table.add_row("preview", preview)
table.add_row("whole demo", f"{total_s} s")
print()
Console(width=110).print(table)
PYTHON
