"""Draw the figures of bench_doctor.py: `python benchmarks/plot_doctor.py [results/doctor.jsonl] [doctor.png]`.

Left: step time that the doctor predicts after the cure against the measured one, one point a case (median of its runs,
lines to the lowest and highest), with a band of 20 %. Right: how many runs of each case had the planted cause named.
Void runs are left out.
"""

from __future__ import annotations

import statistics
import sys

from matplotlib import pyplot as plt

import plots
from bench_doctor import PLANTS, is_void, latest


def main() -> None:
    """Read the last run of each case and seed, and draw."""
    source, picture = plots.paths("doctor")
    records = latest(source)
    if not records:
        sys.exit(f"{source}: no figures of bench_doctor.py in it")
    records = [record for record in records if not is_void(PLANTS[record["plant"]], record["worth"])]
    by_plant = {plant: [r for r in records if r["plant"] == plant] for plant in PLANTS}
    by_plant = {plant: runs for plant, runs in by_plant.items() if runs}
    plots.style()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, 2.4 + 0.21 * len(by_plant)), gridspec_kw={"width_ratios": [1, 0.9]}
    )
    everything = [
        1000 * value for runs in by_plant.values() for r in runs for value in (r["cured_s"], r["predicted_s"]) if value
    ]
    ends = [0.8 * min(everything), 1.25 * max(everything)]
    left.fill_between(
        ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color="#e6eaec", label="within 20 %"
    )
    left.plot(ends, ends, color="#44525a", lw=0.8)
    for plant, runs in by_plant.items():
        runs = [run for run in runs if run["predicted_s"]]
        if not runs:
            continue
        causes = PLANTS[plant].causes
        counts = bool(causes) and causes[0] != "compute" and statistics.median(run["worth"] for run in runs) >= 1.2
        measured, predicted = ([1000 * run[name] for run in runs] for name in ("cured_s", "predicted_s"))
        x, y = statistics.median(measured), statistics.median(predicted)
        color = plots.OURS if counts else plots.BASE
        left.plot([min(measured), max(measured)], [y, y], color=color, lw=0.8)
        left.plot([x, x], [min(predicted), max(predicted)], color=color, lw=0.8)
        left.plot(x, y, "o", color=color, ms=6)
        left.annotate(str(plant), (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7)
    left.plot([], [], "o", color=plots.OURS, label="cure worth 1.2 or more")
    left.plot([], [], "o", color=plots.BASE, label="others")
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured after the cure, ms a step",
             ylabel="predicted by the doctor, ms a step")  # fmt: skip
    ticks = [tick for tick in (10, 20, 30, 50, 70, 100, 200, 300, 500, 1000) if ends[0] < tick < ends[1]]
    for axis in (left.xaxis, left.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    left.legend(loc="lower right")
    left.set_title("Step time after the cure")
    for place, (plant, runs) in enumerate(by_plant.items()):
        truth = PLANTS[plant]
        good = [run["named"] if truth.causes else run["worth_making"] is False for run in runs]
        for number, right_one in enumerate(sorted(good, reverse=True)):
            right.barh(place, 0.9, left=number, color=plots.OURS if right_one else plots.TARGET, height=0.7)
        said = ", ".join(sorted({run["cause"] or "nothing" for run, hit in zip(runs, good, strict=True) if not hit}))
        if said:
            right.annotate(
                f"said: {said}", (len(runs), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7
            )
    names = [
        f"{(PLANTS[plant].causes or ('no cure worth making',))[0]}: {PLANTS[plant].about}  {plant}"
        for plant in by_plant
    ]
    right.set_yticks(range(len(by_plant)), names, fontsize=7)
    right.set(xlim=(0, 2.6 * max(map(len, by_plant.values()))), xticks=range(1 + max(map(len, by_plant.values()))))
    right.invert_yaxis()
    right.set_title("Runs with the planted cause named")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    how = "shared machine, simulated accelerator; median of the seeds, lines: lowest to highest"
    plots.save(figure, records[-1], picture, how)


if __name__ == "__main__":
    main()
