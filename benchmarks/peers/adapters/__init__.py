"""One module a loader; `measure.py` imports one of them in the virtual environment of that loader.

That environment has NumPy, psutil, torch (for the main thread that trains) and the adapter's REQUIREMENTS, so an
adapter may import what it wants at its top. `run.py` reads REQUIREMENTS and PACKS without importing it: both are plain
literals. What an adapter has:

    REQUIREMENTS = ("ffcv==1.0.2", ...)   names for pip, each pinned exactly; torch comes from tools/constraints.txt
    PACKS = True                          whether it has a packing step of its own; else it reads what was prepared
    ANTIALIASED = False                   whether its transforms smooth what they shrink (only of those that transform)

    def versions() -> dict[str, str]
    def supports(work: Work) -> str       "" if it does this work, else why not, in one sentence
    def settings(work: Work) -> list[dict]   at most 5 candidates, those that its documentation advises first
    def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None

`out` does not exist yet: a file or folder that `pack` makes, whole in one call. "raw" stores pixels: of `data.rows`
where there are any, else of the decoded files of `data.folder`. "jpeg" stores the files of `data.folder` as they are.

    class Loader:
        def __init__(self, work: Work, path: Path, settings: dict, seed: int) -> None
        def epoch(self, number: int) -> Iterator[tuple[NDArray, NDArray]]
        def state(self) -> object | None
        def load_state(self, state: object) -> None
        def close(self) -> None

`path` is what `pack` made; where PACKS is False, `data.rows` of raw works and `data.folder` of JPEG works. An epoch is
shuffled anew, and drops a last batch that is not full. It yields images, as a NumPy view without a copy where the
loader allows it, (B, H, W, C) or (B, C, H, W) in whatever memory layout they come, and labels (B,). `state` is
taken after any batch and goes through pickle to `load_state` of a new Loader, whose next `epoch` goes on from there;
where the loader has no such thing, both are left out.
"""
