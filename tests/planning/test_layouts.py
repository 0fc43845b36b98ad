"""Layouts of every kind: as plain data, transposed, and as views."""

import json
from dataclasses import fields

import pytest

from oocgemm.planning import Chunked, Coding, InMemory, Layout, Layouts, Lines, Op, Remote, Writing
from oocgemm.planning.layout import KINDS, Codings
from oocgemm.planning.plan import recorded_layouts

C = Writing((5, 4), existing=True, encodes=True, encode_bytes=160)
EVERY = {
    "plain": Layout(itemsize=4, resident_bytes=100),
    "chunked": Chunked((5, 7), page_cached=True, decode_bytes=280, contiguous=0, writing=C),
    "lines": Lines(300, scratch_bytes=1 << 20, page_cached=True),
    "memory": InMemory(zero_copy_width=64, pinned=True, itemsize=2),
    "remote": Remote(64, 1 << 20, (5, 7), partial_reads=False, request_chunk=(10, 14), writing=C),
}


def test_every_kind_is_tested_and_small() -> None:
    assert {name: type(layout) for name, layout in EVERY.items()} == KINDS
    assert max(len(fields(kind)) for kind in KINDS.values()) <= 10


@pytest.mark.parametrize("name", EVERY)
def test_layouts_are_restored_from_plain_data(name: str) -> None:
    codings = Codings(a=Coding("blosc-zstd", 4096, 0.3), c=Coding("zstd"))
    layouts = Layouts(EVERY[name], Layout(), EVERY["chunked"], codings=codings)
    assert recorded_layouts(json.loads(json.dumps(layouts.to_dict()))) == layouts


@pytest.mark.parametrize(
    "wrong", [{"kind": "tape"}, {"itemsize": "8"}, {"read_chunk": [5, 7, 9]}, {"new": 1}]
)
def test_other_data_are_refused(wrong: dict[str, object]) -> None:
    data = json.loads(json.dumps(Layouts(EVERY["chunked"]).to_dict()))
    data["a"] |= wrong
    with pytest.raises((KeyError, TypeError, ValueError)):
        recorded_layouts(data)


@pytest.mark.parametrize("name", EVERY)
def test_the_transpose_of_the_transpose_is_the_same(name: str) -> None:
    layout = EVERY[name]
    turned = layout.oriented(Op.T)
    assert layout.oriented(Op.N) == layout == turned.oriented(Op.C)
    assert turned.contiguous == 1 - layout.contiguous
    assert turned.read_chunk == layout.read_chunk[::-1]
    assert turned.writing.chunk == layout.writing.chunk[::-1]
    assert turned.request_chunk == layout.request_chunk[::-1]


@pytest.mark.parametrize("name", EVERY)
def test_a_view_computes_elements_in_memory_of_its_own(name: str) -> None:
    layout = EVERY[name]
    view = layout.computed(1000, 50)
    assert view.decode_bytes == layout.decode_bytes + 1000
    assert view.resident_bytes == layout.resident_bytes + 50
    assert view.itemsize == layout.itemsize
    assert [view.in_memory, view.in_place, view.is_direct((1, 1 << 20))] == [False] * 3
    assert view.page_cached == (layout.page_cached or layout.in_memory)
