from __future__ import annotations

import os
import pickle
import pickletools
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import SourceError
from fastload.sources.cifar_pickle import read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_values_are_read_as_pickle_reads_them(value, protocol):
    if protocol < 3 and "bytearray" in pickle.dumps(value, protocol).decode("latin1"):
        return
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i4", "f8", "?", "<u2"])
def test_arrays_of_every_order_are_read(protocol, dtype):
    values = (np.arange(600).reshape(20, 30) % 251).astype(dtype)
    for array in (values, np.asfortranarray(values)):
        data = pickle.dumps({"a": array, "b": np.float32(2.5)}, protocol)
        read = read_pickle(data, "x")
        assert np.array_equal(read["a"], values) and read["a"].dtype == values.dtype.newbyteorder("=")
        assert read["b"] == 2.5 and not read["a"].flags.writeable


def test_texts_of_python_2_are_bytes():
    data = b"\x80\x02}q\x00(U\x04dataq\x01U\x02abq\x02U\x06labelsq\x03]q\x04(K\x01K\x02J\x00\x00\x01\x00eu."
    assert read_pickle(data, "x") == {b"data": b"ab", b"labels": [1, 2, 65536]}
    assert read_pickle(b"(dp0\nS'a\\n'\np1\nI7\nsS'b'\nL8L\nsS'c'\nI01\ns.", "x") == {b"a\n": 7, b"b": 8, b"c": True}


class Calls:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_anything_is_refused_by_its_name_and_does_nothing(protocol, tmp_path):
    canary = tmp_path / "canary"
    command = f"touch {canary}"
    for call, name in (
        ((os.system, command), r"asks for (posix|nt)\.system"),
        ((eval, f"__import__('os').system({command!r})"), r"asks for (builtins|__builtin__)\.eval"),
        ((exec, f"import os; os.system({command!r})"), r"asks for (builtins|__builtin__)\.exec"),
        ((getattr, Calls(__import__, "os"), "system"), r"asks for (builtins|__builtin__)\.getattr"),
        ((np.load, str(canary)), r"asks for numpy"),
        ((print, "x"), r"\.print"),
    ):
        for value in (Calls(*call), {"data": [Calls(*call)]}, (1, {"labels": Calls(*call)})):
            with pytest.raises(SourceError, match=name):
                read_pickle(pickle.dumps(value, protocol), "x")
    assert not canary.exists()


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
TRICKS = {
    "protocol 0": (b"cos\nsystem\n(S'id'\ntR.", "asks for os.system"),
    "inst": (b"(S'id'\nios\nsystem\n.", "asks for os.system"),
    "obj": (b"(cos\nsystem\nS'id'\no.", "asks for os.system"),
    "dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.", "asks for numpy.ndarray.dumps"),
    "dots in the module": (b"cnumpy.core\nmultiarray.os.system\n.", "asks for numpy.core.multiarray.os.system"),
    "stack global of bytes": (b"\x80\x04C\x02osC\x06system\x93.", "damaged"),
    "newobj": (b"\x80\x02cnumpy\nndarray\nK\x01\x85\x81.", "asks to make an object"),
    "newobj_ex": (b"\x80\x04cnumpy\nndarray\n)}\x92.", "asks to make an object"),
    "persistent": (b"Pabc\n.", "fetch an object"),
    "binpersid": (b"K\x01Q.", "fetch an object"),
    "extension": (b"\x80\x02\x82\x01.", "call an extension"),
    "out of band": (b"\x80\x05\x97.", "instruction b'\\\\x97'"),
    "call a number": (b"K\x01)R.", "asks to call a value"),
    "call the array type": (b"cnumpy\nndarray\n(K\x01tR.", "asks for numpy.ndarray in a way"),
    "build on a name": (b"cnumpy\nndarray\n}U\x01aK\x01sb.", "set the state"),
    "build on a list": (b"]}U\x01aK\x01sb.", "set the state"),
    "append to a dict": (b"}K\x01a.", "damaged"),
    "another codec": (b"c_codecs\nencode\n(V61\nV" + b"hex\ntR.", "asks for _codecs.encode in a way"),
    "object array": (ARRAY + b"(I1\n(I1\ntcnumpy\ndtype\n(S'O8'\ntRI00\n(lI1\natb.", "Python objects"),
    "object array by code": (ARRAY + b"(I1\n(I1\ntcnumpy\ndtype\n(S'O'\ntRI00\nS'12345678'\ntb.", "Python objects"),
    "record array": (ARRAY + b"(I1\n(I1\ntcnumpy\ndtype\n(S'V8'\ntRI00\nS'12345678'\ntb.", "type 'V8'"),
    "too large": (ARRAY + b"(I1\n(I99999999999\ntcnumpy\ndtype\n(S'u1'\ntRI00\nS'1'\ntb.", "of 1 bytes"),
    "negative": (ARRAY + b"(I1\n(I-1\ntcnumpy\ndtype\n(S'u1'\ntRI00\nS''\ntb.", "not made of bytes"),
    "other type": (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.", "in a way that NumPy"),
    "unhashable key": (b"}]K\x01s.", "has a list as a key"),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_refused(trick):
    data, reason = TRICKS[trick]
    with pytest.raises(SourceError, match=reason):
        read_pickle(data, "x")


def test_deep_nesting_and_huge_memo_indexes_are_read():
    deep = b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(read_pickle(deep, "x"), list)
    nested = b")" + b"\x85" * 100_000  # a tuple in a tuple in ...: hashing it would overflow the C stack
    for refused in (b"}" + nested + b"K\x01s.", b"}(" + nested + b"K\x01u.", b"(" + nested + b"K\x01d."):
        with pytest.raises(SourceError, match="has a tuple as a key"):
            read_pickle(refused, "x")
    assert read_pickle(b"K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff.", "x") == 7


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


MANY = 50_000
SCALAR = b"cnumpy.core.multiarray\nscalar\nq\0(cnumpy\ndtype\n(S'S50000'\ntRT"
STATE = ARRAY[:36] + b"q\0" + ARRAY[36:-1] + b"q\1(K\1(J\x50\xc3\0\0tcnumpy\ndtype\n(S'u1'\ntRK\0B"
REPEATED = b"h\0h\1Ra" * MANY + b"."  # calls a function of the memo again and again
GREEDY = {
    # Sizes of far more than the file.
    **{f"size {code!r}": code + struct.pack("<Q", 2**40) + b"abc." for code in (b"\x8e", b"\x8d", b"\x96", b"\x95")},
    **{f"size {code!r}": code + struct.pack("<I", 2**32 - 1) + b"abc." for code in (b"B", b"X", b"j", b"r")},
    **{f"size {code!r}": code + struct.pack("<i", 2**31 - 1) + b"abc." for code in (b"T", b"\x8b")},
    "negative size": b"T" + struct.pack("<i", -5) + b"abc.",
    "shape": ARRAY + b"(I1\n(I99999\nI99999\nI99\ntcnumpy\ndtype\n(S'u1'\ntRI00\nS'1'\ntb.",
    "bytes of a size": b"c__builtin__\nbytes\n(I99999999999\ntR.",
    "digits": b"I" + b"9" * MANY + b"\n.",
    # Instructions of a byte or two that make objects or keep references.
    "marks": b"(" * MANY,
    "lists": b"]" * MANY + b".",
    "dicts": b"}" * MANY + b".",
    "tuples": b")" + b"\x85" * MANY + b".",
    "duplicates": b"](" + b"2" * MANY + b"t.",
    "memo": b")" + b"\x94" * MANY + b".",
    "memo by index": b")" + b"".join(b"r" + struct.pack("<I", n) for n in range(MANY // 5)) + b".",
    "wide text": text("\U0001f600".encode() + b"a" * MANY) + b".",
    # A text that the memo repeats and a function copies each time.
    "encode": b"c_codecs\nencode\nq\0" + text(b"a" * MANY) + text(b"latin1") + b"\x86q\x01]" + REPEATED,
    "array": STATE + struct.pack("<I", MANY) + b"a" * MANY + b"tq\2]" + b"h\0h\1Rh\2ba" * MANY + b".",
    "scalar": SCALAR + struct.pack("<I", MANY) + b"a" * MANY + b"tq\1]" + REPEATED,
}


@pytest.mark.parametrize("case", GREEDY)
def test_memory_stays_in_proportion_to_the_file(case):
    data = GREEDY[case]
    tracemalloc.start()
    try:
        read_pickle(data, "x")
    except SourceError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 150 * len(data) + 20_000


def assert_read_or_refused(data):
    try:
        read_pickle(data, "x")
    except SourceError as exc:  # whatever else is raised fails the test
        assert "pickle" in str(exc)


@given(data=st.binary(max_size=200), cut=st.integers(0, 4), change=st.integers(0, 399), to=st.integers(0, 255))
def test_any_bytes_and_a_changed_pickle_are_read_or_refused(data, cut, change, to):
    assert_read_or_refused(data)
    changed = bytearray(pickle.dumps({"labels": [1, 2], "data": np.zeros((2, 60), np.uint8), "x": "y"}, 2))
    changed[change % len(changed)] = to
    assert_read_or_refused(bytes(changed[: len(changed) - cut]))


def test_every_opcode_of_pickletools_is_known_or_refused():
    for opcode in pickletools.opcodes:
        assert_read_or_refused(opcode.code.encode("latin1") + b"\0" * 20)
    assert isinstance(read_pickle(ARRAY + b".", "x"), np.ndarray)  # never filled
