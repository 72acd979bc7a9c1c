"""Imports the package `injected` into the user's Python before their script; `fastload doctor` has it on PYTHONPATH."""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))

if __name__ == "sitecustomize" and os.environ.get("FASTLOAD_DOCTOR"):
    try:
        _folder = os.path.join(os.path.dirname(_HERE), "injected")
        _spec = importlib.util.spec_from_file_location("fastload_doctor_injected", os.path.join(_folder, "__init__.py"))
        assert _spec is not None and _spec.loader is not None, "it is part of fastload"
        _package = sys.modules["fastload_doctor_injected"] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_package)
        _package.start()
    except Exception:  # noqa: BLE001  # the script runs all the same
        pass
    # The sitecustomize that would have run without us runs now, and sys.path is as it would have been.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    _mine = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = _mine
