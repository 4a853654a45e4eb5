"""The task's tokenizer: exact round trips, distinct special tokens, loadable by transformers."""

import json

import pytest

from dynarl.tasks import tokenizer
from dynarl.tasks.arithmetic import Arithmetic

CODEC = tokenizer.build(Arithmetic({}, 1).symbols())


def test_every_text_of_the_task_comes_back_exactly():
    task = Arithmetic({"worked": 0.5, "max_digits": 3}, 1)
    for index in range(200):
        text = "".join(task.demonstration(index))
        ids = CODEC.encode(text)
        assert CODEC.decode(ids) == text
        assert min(ids) > 3, "no special or unknown token in ordinary text"


def test_question_and_response_are_encoded_apart_as_they_are_together():
    question, response = Arithmetic({"worked": 1.0}, 1).demonstration(0)
    assert CODEC.encode(question) + CODEC.encode(response) == CODEC.encode(question + response)


def test_the_vocabulary_can_be_cut_evenly():
    assert CODEC.vocab_size == 192


def test_decoding_stops_at_the_end_token_and_shows_other_special_tokens():
    one = CODEC.encode("1")
    assert CODEC.decode([*one, CODEC.eos_id, *one]) == "1"
    assert CODEC.decode([*one, 0, *one]) == "1<pad>1"


def test_unknown_text_becomes_the_unknown_token():
    assert CODEC.encode("1x") == [*CODEC.encode("1"), 3]


def test_symbols_must_be_distinct():
    with pytest.raises(ValueError, match="distinct"):
        tokenizer.build(["a", "a"])


def test_a_saved_tokenizer_loads_again(tmp_path):
    CODEC.save(tmp_path / "tok")
    again = tokenizer.load(tmp_path / "tok")
    question = Arithmetic({}, 1).question("train", 0)
    assert again.encode(question) == CODEC.encode(question) and again.eos_id == CODEC.eos_id


def test_transformers_reads_the_same_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    CODEC.save(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    question, response = Arithmetic({"worked": 1.0}, 1).demonstration(1)
    assert loaded(question + response)["input_ids"] == CODEC.encode(question + response)
    assert loaded.decode(CODEC.encode(response)) == response
    assert loaded.eos_token_id == CODEC.eos_id
    assert len({loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id}) == 4


def test_a_directory_that_is_no_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        tokenizer.load(tmp_path)
    CODEC.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="eos_token"):
        tokenizer.load(tmp_path)
