import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.sources.coco_regions import decode_counts


def encode(lengths: list[int]) -> str:
    """COCO's string of runs."""
    text = ""
    for i, length in enumerate(lengths):
        value = length - (lengths[i - 2] if i > 2 else 0)
        while True:
            bits = value & 0x1F
            value >>= 5
            more = value != (-1 if bits & 0x10 else 0)
            text += chr((bits | 0x20 if more else bits) + 48)
            if not more:
                break
    return text


@given(st.lists(st.integers(0, 2**28), max_size=12))
def test_runs_in_a_string_come_back(lengths: list[int]) -> None:
    assert decode_counts(encode(lengths)) == lengths


def test_a_string_cut_short_is_refused() -> None:
    with pytest.raises(ValueError, match="cut short"):
        decode_counts(encode([100_000])[:-1])
