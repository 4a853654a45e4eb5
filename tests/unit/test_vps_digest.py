import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.vps.digest import digest_box, digest_chunks, digest_weights


@given(st.binary(min_size=1, max_size=200), st.data())
def test_the_digest_does_not_depend_on_how_the_bytes_arrive(data, draw):
    cut = draw.draw(st.integers(0, len(data)))
    assert digest_chunks([data[:cut], data[cut:]]) == digest_chunks([data])


def test_swapped_chunks_change_it_though_their_sum_does_not():
    assert digest_chunks([b"weights-A", b"weights-B"]) != digest_chunks([b"weights-B", b"weights-A"])


def write(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_only_the_data_section_of_the_file_counts(tmp_path):
    for name, header in (("a", {}), ("b", {"__metadata__": {"format": "pt", "note": "x"}})):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", header, b"0123456789")
    assert digest_weights(tmp_path / "a") == digest_weights(tmp_path / "b") == f"{zlib.crc32(b'0123456789'):08x}"


def test_weights_split_over_files_are_taken_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.safetensors", {}, b"world")
    write(tmp_path / "a.safetensors", {}, b"hello ")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    )
    assert digest_weights(tmp_path) == digest_chunks([b"hello world"])


def test_a_file_without_a_whole_header_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{")
    with pytest.raises(ValueError, match="cut short"):
        digest_weights(tmp_path)


# ---- digests of boxes in memory


def tensor(shape=(6, 8), dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def whole(array, name="w", kind="master"):
    return digest_box(name, kind, tuple((0, size) for size in array.shape), array)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=3), st.lists(st.integers(0, 8), max_size=3), st.sampled_from("fdeB"))
def test_boxes_that_tile_a_tensor_add_up_to_its_digest(rows, columns, dtype):
    array = tensor(dtype=dtype) if dtype != "B" else np.arange(48, dtype=np.uint8).reshape(6, 8)
    rows, columns = sorted({0, 6, *rows}), sorted({0, 8, *columns})
    total = sum(
        digest_box("w", "master", ((a, b), (c, d)), array[a:b, c:d])
        for a, b in zip(rows, rows[1:])
        for c, d in zip(columns, columns[1:])
    )
    assert total % 2**64 == whole(array)


@settings(deadline=None)
@given(st.data(), st.sampled_from("fed"))
def test_any_two_elements_that_change_places_are_noticed_if_one_of_them_is_the_first_of_its_word(data, dtype):
    array = np.arange(48, dtype=dtype).reshape(6, 8)
    a = data.draw(st.integers(0, 47).filter(lambda at: at % (8 // array.itemsize) == 0))
    b = data.draw(st.integers(0, 47).filter(lambda at: at != a))
    swapped = array.copy().ravel()
    swapped[[a, b]] = swapped[[b, a]]
    assert whole(swapped.reshape(6, 8)) != whole(array)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 7), st.integers(0, 31), st.sampled_from("BfeH"))
def test_a_bit_that_flips_is_noticed_wherever_it_is(row, column, bit, dtype):
    array = np.arange(48).astype(dtype).reshape(6, 8)
    flipped = array.copy()
    flipped.view(f"u{array.itemsize}")[row, column] ^= 1 << bit % (8 * array.itemsize)
    assert whole(flipped) != whole(array)


def test_halves_that_change_places_and_transposed_or_moved_rows_are_noticed():
    array = tensor((6, 6))
    halves = np.concatenate([array[3:], array[:3]])
    others = [halves, array.T.copy(), array[::-1].copy(), np.roll(array, 1, axis=1), -array]
    assert len({whole(a) for a in [array, *others]}) == 6
    assert whole(array) not in (whole(array, name="v"), whole(array, kind="exp_avg"))


def test_zeros_that_are_missing_are_noticed_and_nans_count_by_their_bits():
    zeros = np.zeros((4, 4), np.float32)
    assert digest_box("w", "m", ((0, 3), (0, 4)), zeros[:3]) != whole(zeros, kind="m")
    array = tensor((4,))
    array[1] = np.nan
    assert whole(array) == whole(array.copy())
    array.view(np.uint32)[1] ^= 1
    assert whole(array) != whole(tensor((4,)))


def test_an_array_of_another_shape_than_its_box_is_refused():
    with pytest.raises(ValueError, match="does not fit the box"):
        digest_box("w", "master", ((0, 2), (0, 2)), np.zeros((2, 3), np.float32))
