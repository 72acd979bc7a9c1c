from __future__ import annotations

import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from fastload.export.write import encode_png
from fastload.images.decode import decode_image
from fastload.images.fit import Target


@given(st.data())
def test_decoding_gives_back_every_pixel(data):
    channels, dtype = data.draw(
        st.sampled_from([(1, "uint8"), (3, "uint8"), (4, "uint8"), (1, "uint16"), (3, "uint16")])
    )
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    pixels = data.draw(arrays(dtype, (height, width, channels)))
    out = np.empty_like(pixels)
    decode_image(encode_png(pixels), Target(height, width, channels, pixels.dtype), out)
    assert np.array_equal(out, pixels)


def test_pillow_finds_nothing_wrong_and_lines_are_filtered():
    pixels = np.add.outer(np.arange(100, dtype=np.uint8), np.arange(90, dtype=np.uint8))
    data = encode_png(pixels)
    with Image.open(io.BytesIO(data)) as image:
        image.verify()
    assert len(data) < 500
