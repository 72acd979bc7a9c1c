"""Where a thread is: the user's line, the part of making a batch, and the call that takes the time."""

from __future__ import annotations

import json
import sys
import threading
from textwrap import dedent

import pytest

from fastload.profiling.doctor.injected.code_lines import place_of, user_line
from fastload.profiling.doctor.injected.timed_calls import COLLATE, DECODING, WAITING, metering, timed

PACKAGED = "/usr/lib/python3/dist-packages/"


def look():
    """Where the caller is."""
    return place_of(sys._getframe().f_back)


def module(name, text, **others):
    """What a module of an installed package defines."""
    found = {"__name__": name, "look_at": place_of, "sys": sys, **others}
    exec(compile(dedent(text), f"{PACKAGED}{name.replace('.', '/')}.py", "exec"), found)
    return found


LOOKS = "look_at(sys._getframe())"
TRANSFORMS = module("torchvision.transforms.transforms", f"""
    class Module:
        def _call_impl(self, image):
            return self.forward(image)
        __call__ = _call_impl
    class RandomResizedCrop(Module):
        def forward(self, image):
            return self.resized(image)
        def resized(self, image):
            return {LOOKS}
    class Compose:
        def __init__(self, transforms):
            self.transforms = transforms
        def __call__(self, image):
            for one in self.transforms:
                image = one(image)
            return image
    class Folder:
        def __init__(self, transform):
            self.transform = transform
        def __getitem__(self, index):
            return self.transform(index)
""")  # fmt: skip
PILLOW = module("PIL.Image", f"""
    class Image:
        def resize(self):
            return self._shrunk()
        def _shrunk(self):
            return {LOOKS}
    def load():
        return {LOOKS}
""")  # fmt: skip


@pytest.fixture
def works():
    metering.reset()
    metering.active = True
    yield
    metering.reset()


def test_the_users_line_is_the_innermost_that_is_not_of_a_package():
    assert user_line(None) == ""
    found = {}
    json.loads("1", parse_int=lambda _: found.update(now=user_line(sys._getframe())))
    assert found["now"].startswith("<lambda> (test_code_lines.py:")
    line, _, _ = PILLOW["Image"]().resize()
    assert line.startswith("test_the_users_line_is_the_innermost_that_is_not_of_a_package (")


def test_a_transform_is_named_by_its_class_also_in_a_list_and_in_a_datasets_class_of_a_package():
    crop = TRANSFORMS["RandomResizedCrop"]()
    for called in (crop, TRANSFORMS["Compose"]([crop]), TRANSFORMS["Compose"]([TRANSFORMS["Compose"]([crop])])):
        _, part, call = TRANSFORMS["Folder"](called)[0]
        assert (part, call) == ("transform", "RandomResizedCrop")


def test_a_librarys_function_is_named_with_its_module_and_one_in_c_as_the_line_writes_it():
    assert PILLOW["Image"]().resize()[1:] == ("transform", "PIL.Image.resize")
    gate, event = threading.Lock(), threading.Event()

    def waits():
        gate.acquire()
        event.wait()

    gate.acquire()
    thread = threading.Thread(target=waits)
    thread.start()
    seen = set()
    for end in (gate.release, event.set):
        while True:
            line, _, call = place_of(sys._current_frames().get(thread.ident))
            if line.startswith("waits (") and call not in seen:
                break
        seen.add(call)
        end()
    thread.join()
    assert seen == {"gate.acquire", "event.wait"}


def test_own_code_is_named_by_its_function():
    line, part, call = look()
    assert line.startswith("test_own_code_is_named_by_its_function (") and part == "transform"
    assert call == "look"  # which is called on that line


def test_arithmetic_is_named_by_the_function_that_does_it():
    going = [1]

    def adds():
        total = 0
        while going:
            total = (total * total + 1) & 0xFFFF

    thread = threading.Thread(target=adds)
    thread.start()
    while not (place := place_of(sys._current_frames()[thread.ident]))[0].startswith("adds ("):
        pass
    going.clear()
    thread.join()
    assert place[1:] == ("transform", "test_arithmetic_is_named_by_the_function_that_does_it.<locals>.adds")


def test_the_part_is_that_of_the_timed_call_around_it(works):
    decode = timed(PILLOW["load"], DECODING)
    assert decode()[1:] == ("decoding", "PIL.Image.load")
    assert timed(look, WAITING)()[1] == WAITING
    # Within collate_fn, the call inside is named.
    assert timed(lambda: PILLOW["Image"]().resize(), COLLATE)()[1:] == ("collate", "PIL.Image.resize")
