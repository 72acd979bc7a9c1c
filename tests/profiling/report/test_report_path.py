"""Where a report may go, said before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastload.errors import OutputError
from fastload.profiling.report import check_report_path, write_report
from fastload.system.files import save_text
from fastload.timing.results import Measured


def test_a_new_name_in_a_folder_of_ours_is_accepted(tmp_path):
    check_report_path(tmp_path / "report.html")
    check_report_path(str(tmp_path / "report.html"))
    assert list(tmp_path.iterdir()) == []


def test_what_exists_stays_unless_forced(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("precious")
    with pytest.raises(OutputError, match=r"report\.html: exists.*--force"):
        write_report(Measured("x"), path)
    assert path.read_text() == "precious"
    write_report(Measured("x"), path, force=True)
    assert path.read_text().startswith("<!doctype html>")


def test_a_link_that_leads_nowhere_is_not_replaced_unasked(tmp_path):
    (tmp_path / "report.html").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="--force"):
        check_report_path(tmp_path / "report.html")


def test_a_folder_is_refused_even_when_forced(tmp_path):
    with pytest.raises(OutputError, match="is a folder"):
        check_report_path(tmp_path, force=True)


def test_an_absent_folder_is_named(tmp_path):
    with pytest.raises(OutputError, match="nowhere does not exist"):
        check_report_path(tmp_path / "nowhere" / "report.html", force=True)


def test_a_folder_without_permission_is_named():
    code = (
        "import os, sys; from fastload.errors import OutputError\n"
        "from fastload.profiling.report import check_report_path\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"  # root may write everywhere
        "try: check_report_path(os.path.join(sys.argv[1], 'report.html'))\n"
        "except OutputError as exc: print(exc)"
    )
    # Not tmp_path: its parents let nobody else in.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert "no permission to make a file in" in result.stdout


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that takes no files: /proc, on Linux only")
def test_a_folder_that_takes_no_file_is_one_error():
    with pytest.raises(OutputError, match=r"cannot be written|no permission"):
        write_report(Measured("x"), "/proc/self/report.html")


def test_a_file_that_appeared_meanwhile_is_kept(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("somebody else's")
    with pytest.raises(OutputError, match="exists"):
        save_text("ours", path, force=False)
    assert path.read_text() == "somebody else's"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "from pathlib import Path; from fastload.errors import OutputError;"
        "from fastload.system.files import save_text\n"
        "try: save_text('x' * 100_000, Path(sys.argv[1]), force=True)\n"
        "except OutputError as exc: print(exc)"
    )
    path = tmp_path / "report.html"
    path.write_text("old")
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "cannot be written" in result.stdout
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_others_may_read_it_as_any_new_file(tmp_path):
    save_text("x", tmp_path / "report.html", force=False)
    (tmp_path / "usual").write_text("x")
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_absent_extra_is_named_before_anything_is_measured(tmp_path):
    code = (
        "import importlib.util as u, sys; from fastload.errors import MissingExtraError; real = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'jinja2' else real(name, *more)\n"
        "from fastload.profiling.report import check_report_path\n"
        "try: check_report_path(sys.argv[1])\n"
        "except MissingExtraError as exc: print(exc)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "report.html")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "pip install jinja2" in said
