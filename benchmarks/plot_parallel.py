"""Draw the figures of bench_parallel.py: `python benchmarks/plot_parallel.py [results/parallel.jsonl] [parallel.png]`.

One panel a question, with the answer above it, which is printed, too; where there are GPUs, their panels go to a second
picture, `-cuda.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import plots

TASKS = ("classify", "attributes", "segment", "text")
SUMS = {
    "ring": "ring, own", "all_reduce": "torch's all-reduce", "reduce_broadcast": "reduce + broadcast",
    "all_to_all": "all-to-all, there and back",
}  # fmt: skip
MORE = "#e0a458"
Record = dict[str, Any]
Spread = dict[str, float]


class Kind:
    """The figures of one kind of device, by the names without it."""

    def __init__(self, found: dict[str, Record], device: str) -> None:
        end = f"-{device}"
        self.found = {name.removesuffix(end): record for name, record in found.items() if name.endswith(end)}
        self.device = device
        self.world = max([int(name.split("-")[-1]) for name in self.found if name.startswith("overlap-")], default=1)

    def named(self, start: str, end: str = "") -> dict[str, Record]:
        """Figures by what stands between the beginning and the end of their names."""
        return {
            name[len(start) : len(name) - len(end)]: record
            for name, record in self.found.items()
            if name.startswith(start) and name.endswith(end)
        }


def bars(axes: Axes, labels: list[str], values: list[Spread], *, scale: float = 1.0, unit: str, form: str) -> None:
    """A bar for each spread, with its range and its median in figures."""
    axes.grid(axis="x", color="#e6eaec")
    for place, value in enumerate(values):
        low, middle, high = (scale * value[name] for name in ("lowest", "median", "highest"))
        axes.barh(place, middle, 0.6, color=plots.OURS, xerr=[[middle - low], [high - middle]],
                  error_kw={"ecolor": "#44525a", "lw": 1, "capsize": 2})  # fmt: skip
        _said(axes, form.format(middle), high, place)
    _rows(axes, labels)
    axes.set_xlim(0, 1.2 * scale * max(value["highest"] for value in values))
    axes.set_xlabel(unit)


def dots(axes: Axes, labels: list[str], values: list[Spread], unit: str, *, target: float | None = None) -> None:
    """A dot for each ratio, with its range; 1 is a grey line, the target a red one."""
    axes.grid(axis="x", color="#e6eaec")
    axes.axvline(1, color="#8a979e", lw=1)
    if target is not None:
        axes.axvline(target, color=plots.TARGET, lw=1.5)
    for place, value in enumerate(values):
        axes.plot([value["lowest"], value["highest"]], [place, place], color=plots.OURS, lw=2)
        axes.plot(value["median"], place, "o", color=plots.OURS, ms=7)
        _said(axes, f"{value['median']:.3g}", value["highest"], place)
    _rows(axes, labels)
    edges = [1.0, *([target] if target else []), *(value[end] for value in values for end in ("lowest", "highest"))]
    room = max(edges) - min(edges)
    axes.set_xlim(min(edges) - 0.08 * room, max(edges) + 0.25 * room)
    axes.set_xlabel(unit if target is None else f"{unit}; red: target {target:g}")


def step(axes: Axes, kind: Kind) -> str:
    """Images a second of each strategy."""
    found = kind.named("step-")
    bars(axes, [_strategy(name) for name in found], [record["images_per_s"] for record in found.values()],
         unit="images/s, batch held", form="{:,.0f}")  # fmt: skip
    most = found.get(f"ddp-{kind.world}", found["ddp-1"])
    gain = most["images_per_s"]["median"] / found["none-1"]["images_per_s"]["median"]
    return f"Strategies: ddp on {_ranks(kind.world)} gives\n{gain:.2f} times the images/s of one process"


def memory(axes: Axes, kind: Kind) -> str:
    """The most memory of each process or device."""
    found = kind.named("memory-")
    labels, values = [], []
    for name, record in found.items():
        for index, peak in enumerate(record["peak_bytes"]):
            several = f", {'GPU' if kind.device == 'cuda' else 'rank'} {index}" if len(record["peak_bytes"]) > 1 else ""
            labels.append(_strategy(name) + several)
            values.append(_one(peak / 2**20))
    bars(axes, labels, values, unit="MiB that training takes at most",
         form="{:,.0f}")  # fmt: skip
    ddp = next((record for name, record in found.items() if name.startswith("ddp")), found["none-1"])
    more = ddp["peak_bytes"][0] - found["none-1"]["peak_bytes"][0]
    return f"Memory (segment): ddp takes {more / 2**20:+,.0f} MiB\na process over the plain model"


def gathered(axes: Axes, kind: Kind) -> str:
    """Bytes that nn.DataParallel gathers, of answers and of losses."""
    found = kind.named("gathered-")
    axes.grid(axis="x", color="#e6eaec")
    for place, record in enumerate(found.values()):
        at = record["replicas"].index(4)
        for offset, name, color in ((-0.19, "dp_bytes", plots.BASE), (0.19, "dp_loss_bytes", plots.OURS)):
            axes.barh(place + offset, record[name][at], 0.36, color=color)
            _said(axes, _bytes(record[name][at]), record[name][at], place + offset)
    axes.barh([-9], [1], color=plots.BASE, label="dp: the answers")
    axes.barh([-9], [1], color=plots.OURS, label="dp-loss: the losses")
    axes.set_xscale("log")
    most = max(record["dp_bytes"][record["replicas"].index(4)] for record in found.values())
    axes.set_xlim(4, 100 * most)
    axes.legend(loc="lower right", fontsize=8, ncols=2)
    _rows(axes, list(found), room=0.7)
    axes.set_xlabel("bytes gathered on one device in a step, 4 replicas")
    return f"dp brings up to {_bytes(most)} a step to one\ndevice, dp-loss 4 bytes from each other"


def buckets(axes: Axes, kind: Kind) -> str:
    """DDP's reductions, hidden and exposed, by the size of buckets."""
    found = kind.named("buckets-", f"-{kind.world}")
    most = 1e3 * max(record["hidden_s"]["median"] + record["exposed_s"]["median"] for record in found.values())
    axes.grid(axis="x", color="#e6eaec")
    for place, record in enumerate(found.values()):
        hidden, exposed = 1e3 * record["hidden_s"]["median"], 1e3 * record["exposed_s"]["median"]
        axes.barh(place, hidden, 0.6, color=plots.BASE, label=None if place else "hidden behind backward")
        axes.barh(place, exposed, 0.6, left=hidden, color=plots.OURS, label=None if place else "exposed after it")
        share = record["exposed_share"]["median"]
        _said(axes, f"{hidden + exposed:.0f} ms; {share:.1%} of the step exposed", hidden + exposed, place)
    _rows(axes, _bucket_labels(found), room=0.9)
    axes.set_xlim(0, 1.9 * most)
    axes.legend(loc="lower right", fontsize=8, ncols=2)
    axes.set_xlabel(f"ms of reduction in a backward pass, {_ranks(kind.world)}\n{_exchanged(found)}")
    least = min(found.values(), key=lambda record: record["exposed_share"]["median"])
    size = next(name for name, record in found.items() if record is least)
    exposed = least["exposed_share"]["median"]
    return f"Communication: least exposed with {float(size):g} MB\na bucket, for {exposed:.1%} of the step"


def last(axes: Axes, kind: Kind) -> str:
    """From the last gradient until its bucket is reduced."""
    found = kind.named("buckets-", f"-{kind.world}")
    bars(axes, _bucket_labels(found), [record["last_s"] for record in found.values()], scale=1e3,
         unit=f"ms from last gradient to its bucket's reduction\n{_exchanged(found)}", form="{:.1f}")  # fmt: skip
    medians = [1e3 * record["last_s"]["median"] for record in found.values()]
    return f"The last bucket's reduction is exposed\nfor {min(medians):.1f} to {max(medians):.1f} ms"


def overlap(axes: Axes, kind: Kind) -> str:
    """Step times with reductions during backward, after it, and without."""
    record = kind.found[f"overlap-{kind.world}"]
    names = {"overlap_s": "during backward", "delayed_s": "after backward", "no_sync_s": "no reduction"}
    bars(axes, list(names.values()), [record[name] for name in names], scale=1e3,
         unit=f"ms a step\n{_exchanged({'': record})}", form="{:.0f}")  # fmt: skip
    ratio = record["ratio"]
    return f"Overlap on over off: {ratio['median']:.2f} of the step time\n({_range(ratio)}), the same gradients"


def slowed(axes: Axes, kind: Kind) -> str:
    """What backward itself loses to reductions beside it."""
    record = kind.found[f"overlap-{kind.world}"]
    values = [record["backward_slowed"], record["backward_slowed_delayed"]]
    dots(axes, ["reducing meanwhile", "reducing after it"], values,
         f"time until the last gradient, over no_sync\n{_exchanged({'': record})}")  # fmt: skip
    times = values[0]["median"] / values[1]["median"]
    return f"Beside reductions, backward itself takes\n{times:.2f} times as long as before them"


def sums(axes: Axes, kind: Kind) -> str:
    """Ways to add up a tensor, by its size."""
    found = sorted(kind.named("sum-", f"-{kind.world}").values(), key=lambda record: int(record["bytes"]))
    axes.grid(color="#e6eaec")
    sizes = [record["bytes"] / 2**20 for record in found]
    for (name, label), color in zip(SUMS.items(), (plots.OURS, "#44525a", MORE, plots.TARGET), strict=True):
        each = [record[f"{name}_s"] for record in found]
        axes.plot(sizes, [1e3 * value["median"] for value in each], "o-", color=color, ms=4, label=label)
        axes.fill_between(sizes, *([1e3 * value[end] for value in each] for end in ("lowest", "highest")), color=color,
                          alpha=0.15, lw=0)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:g}" if size >= 1 else f"1/{1 / size:.0f}" for size in sizes])
    axes.set_xlabel(f"MiB, {_ranks(kind.world)}")
    axes.set_ylabel("ms")
    axes.legend(fontsize=8)
    largest = found[-1]
    own, two, all_to_all = (
        largest[f"{name}_over_all_reduce"]["median"] for name in ("ring", "reduce_broadcast", "all_to_all")
    )
    return (
        f"{sizes[-1]:g} MiB over torch's all-reduce: reduce +\n"
        f"broadcast {two:.2f}, all-to-all {all_to_all:.2f}, own ring {own:.2f}"
    )


def scaling(axes: Axes, kind: Kind) -> str:
    """Samples a second of several ranks over one."""
    found = {
        f"{task}, {_ranks(int(world))}": record["ratio"]
        for task in TASKS
        for world, record in kind.named(f"scaling-{task}-").items()
    }
    dots(axes, list(found), list(found.values()), f"samples/s over one rank alone, {_turns(found)}", target=1.6)
    medians = [value["median"] for name, value in found.items() if name.endswith(_ranks(kind.world))]
    return f"{_ranks(kind.world)}: {min(medians):.2f} to {max(medians):.2f} times\nthe samples/s of one"


def one_rank(axes: Axes, kind: Kind) -> str:
    """DDP on one rank over the plain model."""
    found = kind.named("one-rank-")
    values = [record["ratio"] for record in found.values()]
    turns = _turns(dict(zip(found, values, strict=True)))
    dots(axes, list(found), values, f"step time of ddp on one rank over the plain model, {turns}")
    medians = [value["median"] for value in values]
    return f"ddp on one rank takes {min(medians):.2f} to {max(medians):.2f}\ntimes the plain model's step"


def fed(axes: Axes, kind: Kind) -> str:
    """A step with FastLoader over the step on a held batch."""
    found = {}
    for task in TASKS:
        for threads, record in kind.named(f"fed-{task}-").items():
            found[f"{task}, {threads} thread{'s' if threads != '1' else ''}"] = record["ratio"]
    dots(axes, list(found), list(found.values()), f"step fed by FastLoader over a held batch, {_turns(found)}",
         target=1.03)  # fmt: skip
    most = max(value["median"] for value in found.values())
    return f"Loading: a step fed by FastLoader takes\nat most {most:.3f} of one on a held batch"


def options(axes: Axes, kind: Kind) -> str:
    """Precision, memory layout and accumulation."""
    names = {
        "precision-bf16": "bf16 over fp32", "precision-fp16": "fp16 over fp32",
        "precision-contiguous": "contiguous over\nchannels last",
        f"accumulation-{kind.world}": "4 batches a step, no_sync\nover reducing each",
    }  # fmt: skip
    found = {label: kind.found[name]["ratio"] for name, label in names.items() if name in kind.found}
    dots(axes, list(found), list(found.values()), "step time")
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(value["lowest"] for value in found.values()),
                  2 * max(value["highest"] for value in found.values()))  # fmt: skip
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20) if axes.get_xlim()[0] < tick < axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    times = {name: kind.found[f"precision-{name}"]["ratio"]["median"] for name in ("bf16", "fp16")}
    here = "processor" if kind.device == "cpu" else "GPU"
    return f"On this {here}, bf16 takes {times['bf16']:.2f}\nand fp16 {times['fp16']:.2f} of fp32's step"


PANELS: dict[Callable[[Axes, Kind], str], str] = {
    step: "step-", memory: "memory-", gathered: "gathered-", buckets: "buckets-", last: "buckets-", overlap: "overlap-",
    slowed: "overlap-", sums: "sum-", scaling: "scaling-", one_rank: "one-rank-", fed: "fed-", options: "precision-",
}  # fmt: skip


def _rows(axes: Axes, labels: list[str], room: float = 0.0) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set_ylim(len(labels) - 0.5 + room, -0.5)


def _said(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def _strategy(name: str) -> str:
    strategy, world = name.rsplit("-", 1)
    return f"{strategy}, {_ranks(int(world))}" if strategy == "ddp" else strategy


def _bucket_labels(found: dict[str, Record]) -> list[str]:
    return [
        f"{float(name):g} MB, {record['buckets']} bucket{'s' if record['buckets'] > 1 else ''}"
        for name, record in found.items()
    ]


def _exchanged(found: dict[str, Record]) -> str:
    record = next(iter(found.values()))
    return f"{record['batch_size']} rows a rank, {record['parameters_mb']:.0f} MB of gradients"


def _turns(found: dict[str, Spread]) -> str:
    """How many there were, where they may be more than the line under the picture says."""
    return f"{min(value['count'] for value in found.values()):.0f} turns"


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def _range(value: Spread) -> str:
    return f"{value['lowest']:.2f} to {value['highest']:.2f}"


def _one(value: float) -> Spread:
    return {"median": value, "lowest": value, "highest": value}


def _bytes(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB"


def main() -> None:
    """Read the last run of each figure and draw."""
    source, picture = plots.paths("parallel")
    found = plots.latest(source)
    plots.style()
    drawn = False
    for device in ("cpu", "cuda"):
        kind = Kind(found, device)
        panels = [panel for panel, start in PANELS.items() if kind.named(start)]
        if not panels:
            continue
        drawn = True
        rows = -(-len(panels) // 3)
        figure, axes = plt.subplots(rows, 3, figsize=(16, 3.5 * rows), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, panel in zip(axes.flat, panels, strict=False):
            answer = panel(axis, kind)
            axis.set_title(answer)
            print(f"{device}: {' '.join(answer.split())}")
        figure.tight_layout(rect=(0, 0.02, 1, 1), h_pad=2, w_pad=2)
        first = next(iter(kind.found.values()))
        plots.save(figure, first, picture if device == "cpu" else picture.with_stem(f"{picture.stem}-cuda"))
    if not drawn:
        sys.exit(f"{source}: no figures of bench_parallel.py in it")


if __name__ == "__main__":
    main()
