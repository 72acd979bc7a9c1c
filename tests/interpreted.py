"""Runs a script whose kernels Triton's interpreter runs: `python interpreted.py SCRIPT`.

Whether Triton compiles or interprets is settled when it is imported, so that the script has a process of its own. The
interpreter would put its own functions in place of Triton's at each call of one kernel function by another, where they
are already: that took 40 % of its time.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    as_triton_does = interpreter.InterpretedFunction.__call__

    def call(function: Any, *args: Any, **options: Any) -> Any:
        names = function.fn.__globals__
        languages = [names[name] for name in ("tl", "core") if name in names]
        if not languages or any(tl.core.is_builtin(language.load) for language in languages):
            return as_triton_does(function, *args, **options)
        return function.rewrite()(*args, **options)

    interpreter.InterpretedFunction.__call__ = call
    script = Path(sys.argv.pop(1)).resolve()
    sys.path.insert(1, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
