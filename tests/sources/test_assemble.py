import io

import numpy as np
import pytest
from PIL import Image

from fastload.errors import SourceError
from fastload.sources.assemble import fill_value, values_in_masks


class InMemory:
    def __init__(self, *masks: np.ndarray) -> None:
        self.data = []
        for mask in masks:
            file = io.BytesIO()
            Image.fromarray(mask).save(file, "PNG")
            self.data.append(file.getvalue())

    def read(self, i: int) -> bytes:
        return self.data[i]

    def read_head(self, i: int, size: int) -> bytes:
        return self.data[i][:size]

    def take(self, indices: np.ndarray) -> "InMemory":
        raise NotImplementedError


def gray(*values: int) -> np.ndarray:
    return np.array([values], np.uint8)


def test_an_absent_mask_is_a_value_that_no_other_holds() -> None:
    present = np.array([True, False, True])
    assert fill_value(InMemory(gray(0, 1), gray(9), gray(2, 2)), present, "x")[0] == 255
    value, notes = fill_value(InMemory(gray(0, 255), gray(9), gray(254, 1)), present, "x")
    assert value == 253 and "(1): theirs are 253 throughout, as other masks hold 255, 254" in notes[0]
    assert fill_value(InMemory(gray(0)), np.array([True]), "x") == (None, [])
    with pytest.raises(SourceError, match=r"use all values from 0 to 255"):
        fill_value(InMemory(gray(*range(256)), gray(0), gray(0)), present, "x")


def test_masks_of_one_bit_hold_0_and_1() -> None:
    assert values_in_masks(InMemory(np.array([[True, False]])), [0]).tolist() == [0, 1]
