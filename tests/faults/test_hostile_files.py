from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import FILES, many_attributes, many_datasets, packed, sample

from fastload.errors import FormatError
from fastload.inspection.info import inspect_file

# Those that were found first, by hand.
_ALWAYS = (
    "root seed text", "root seed nan", "attribute split names array", "field split negative", "images wraps",
    "images chunk of 2^32 - 1", "foreign chunk of 2^32 - 1", "images 2^63 rows", "foreign 2^62 rows", "bomb chunk",
    "images virtual of a secret", "images external to a secret",
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory need /proc")
def test_every_command_on_a_hostile_file_ends_in_a_result_or_an_error_of_ours(tmp_path: Path) -> None:
    count = int(os.environ.get("FASTLOAD_HOSTILE_FILES", "20"))  # of 627; all take 3 minutes
    names = sorted({*_ALWAYS, *sample(count)})
    command = [sys.executable, str(Path(__file__).with_name("hostile_commands.py")), *names]
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tools"), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0 and "---" not in done.stdout, done.stdout + done.stderr
    assert f"{len(names)} files, 11 commands" in done.stdout


def test_the_hostile_files_are_many_and_their_sample_has_some_of_each_family() -> None:
    assert len(FILES) > 500 and sample(40) == sample(40)
    assert {name.split()[0] for name in sample(40)} == {name.split()[0] for name in FILES} - {"bomb", "many"}
    assert set(sample(len(FILES))) == set(FILES)


def test_info_looks_at_some_of_many_attributes_and_datasets_and_says_so(tmp_path: Path) -> None:
    many_attributes(tmp_path / "a.h5", 2100)
    assert "Of 2,100 attributes only the first 2,000 are looked at." in inspect_file(tmp_path / "a.h5").findings
    many_datasets(tmp_path / "d.h5", 1300)
    found = inspect_file(tmp_path / "d.h5")
    assert len(found.fields) == 1003 and found.num_samples == 12
    assert "300 more datasets or groups in it are not looked at." in found.findings
    for write in (many_attributes, many_datasets):
        write(tmp_path / "p.h5", 2100, packed)
        with pytest.raises(FormatError, match=r"p.h5: .* far more than any release writes"):
            inspect_file(tmp_path / "p.h5")
