"""Numbers in words."""

from __future__ import annotations

import math

from fastload.system.text import number_text, seconds_text, share_text


def test_seconds_numbers_and_shares_have_three_digits_and_a_unit():
    seconds = {0: "0 s", 8.3e-4: "830 µs", 0.01234: "12.3 ms", 0.9996: "1.00 s", 4.2: "4.20 s", 200: "3 min 20 s",
               7500: "2 h 5 min", math.nan: "not known"}  # fmt: skip
    assert {value: seconds_text(value) for value in seconds} == seconds
    numbers = {0: "0", 12345.6: "12,346", 99.97: "100", 12.34: "12.3", 1.234: "1.23", -3: "-3.00"}
    assert {value: number_text(value) for value in numbers} == numbers
    shares = {0: "0 %", 0.004: "0.4 %", 0.0949: "9.5 %", 0.62: "62 %", 1: "100 %", math.inf: "not known"}
    assert {value: share_text(value) for value in shares} == shares
