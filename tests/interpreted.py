"""Runs a script whose kernels Triton's interpreter runs: `python interpreted.py SCRIPT`.

Whether Triton compiles or interprets is settled when it is imported, so that the script has a process of its own: the
fixture `run_interpreted` forks it off one that has imported Triton. The interpreter would put its own functions in
place of Triton's at each call of one kernel function by another, where they are already: that took 40 % of its time. Of
what was left 40 % went into sums that tell whether integers overflow, which it drops unlooked at (its options have no
`debug`), and a tenth into a table that it makes for each look at it.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from dataclasses import replace
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
    if not interpreter.interpreter_builder.options.debug:
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options
    by_table = interpreter._get_np_dtype
    known = functools.cache(by_table)

    def as_numpy_says(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return by_table(scalar) if isinstance(scalar, tl.pointer_type) else known(scalar)

    interpreter._get_np_dtype = as_numpy_says
    script = Path(sys.argv.pop(1)).resolve()
    sys.path.insert(1, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
