"""Placements that Hypothesis draws."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fastload.transforms.engine.placement import Placement


@st.composite
def varied(draw, batch=3, factors=(1,)):
    """The shapes of images, a placement of them, and a factor for each that is no larger than its window."""
    shapes, numbers, shrunk = [], [], []
    size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    for _ in range(batch):
        factor = draw(st.sampled_from(factors))
        window = draw(st.integers(factor, 40)), draw(st.integers(factor, 40))
        first = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        beyond = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        scaled = draw(st.integers(size[0], 20)), draw(st.integers(size[1], 20))
        fits = window[0] >= size[0] and window[1] >= size[1]
        scaled = window if fits and draw(st.integers(0, 3)) == 0 else scaled
        offset = draw(st.integers(0, scaled[0] - size[0])), draw(st.integers(0, scaled[1] - size[1]))
        shapes.append([sum(side) for side in zip(first, window, beyond, strict=True)])
        numbers.append([*first, *window, *scaled, *offset])
        shrunk.append(factor)
    flags = np.array(draw(st.lists(st.booleans(), min_size=2 * batch, max_size=2 * batch)))
    columns = (np.array(numbers)[:, first : first + 2] for first in (0, 2, 4, 6))
    return np.array(shapes), Placement(*columns, np.array([size]), flags.reshape(batch, 2)), np.array(shrunk)
