"""Where a report may go, said before anything is measured."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from child_processes import run_python

from fastload.errors import OutputError
from fastload.profiling.report import check_report_path, write_report
from fastload.system.files import save_text
from fastload.timing.results import Measured

IN_A_PROCESS = """
import importlib.util, os, resource, signal, sys
from pathlib import Path
from fastload.errors import FastloadError
from fastload.profiling.report import check_report_path
from fastload.system.files import save_text
find_spec, out = importlib.util.find_spec, Path(sys.argv[1])
try:
    {}
except FastloadError as exc:
    print(f"{{type(exc).__name__}}: {{exc}}")
"""


def said(code: str, path: Path) -> str:
    """Returns the error of a line of code in a process of its own, which may do to itself what it likes."""
    return run_python("-c", IN_A_PROCESS.format(code), path)


def test_a_new_name_is_accepted_and_what_exists_stays_unless_forced(tmp_path):
    path = tmp_path / "report.html"
    check_report_path(path)
    check_report_path(str(path))
    assert list(tmp_path.iterdir()) == []
    path.write_text("precious")
    with pytest.raises(OutputError, match=r"report\.html: exists.*--overwrite"):
        write_report(Measured("x"), path)
    with pytest.raises(OutputError, match="exists"):  # it appeared after it was looked for
        save_text("ours", path, force=False)
    assert path.read_text() == "precious" and [one.name for one in tmp_path.iterdir()] == ["report.html"]
    write_report(Measured("x"), path, force=True)
    assert path.read_text().startswith("<!doctype html>")
    (tmp_path / "usual").write_text("x")  # others may read it as any new file
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_cannot_be_a_report_is_named(tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="--overwrite"):
        check_report_path(tmp_path / "link.html")
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "nowhere" / "report.html", "nowhere does not exist")):
        with pytest.raises(OutputError, match=why):
            check_report_path(path, force=True)


def test_a_folder_without_permission_and_one_that_takes_no_file_are_named():
    as_nobody = "os.geteuid() or os.setuid(65534); check_report_path(out)"  # root may write everywhere
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: its parents let nobody else in
        os.chmod(folder, 0o555)
        assert "OutputError: " in (text := said(as_nobody, Path(folder) / "report.html"))
    assert "no permission to make a file" in text
    if Path("/proc/self").is_dir():  # a folder that takes no files, on Linux
        with pytest.raises(OutputError, match=r"cannot be written|no permission"):
            write_report(Measured("x"), "/proc/self/report.html")


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    full = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    text = said(f"{full}; save_text('x' * 100_000, out, force=True)", path)
    assert text.startswith("OutputError: ") and "cannot be written" in text
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_an_absent_extra_is_named_before_anything_is_measured(tmp_path):
    absent = "importlib.util.find_spec = lambda name, *more: None if name == 'jinja2' else find_spec(name, *more)"
    text = said(f"{absent}; check_report_path(out)", tmp_path / "report.html")
    assert text.startswith("MissingExtraError: ") and "pip install jinja2" in text
