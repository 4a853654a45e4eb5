import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.vps.digest import digest_chunks, digest_weights


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
