"""Which ids a run is trained on: the tokenizer's content decides, and documents have ends."""

import numpy as np
import pytest

from ragged_fsdp.models.source import find_model
from ragged_fsdp.trainer.config_check import likely_mistakes
from ragged_fsdp.trainer.config_file import ConfigError, from_values
from ragged_fsdp.trainer.data import open_tokens
from train_cases import save_words


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGED_FSDP_CACHE", str(tmp_path / "cache"))


def _open(*values, model=""):
    return open_tokens(from_values(*values).data, model)


def test_a_local_dataset_and_a_tokenizer_folder(tmp_path):
    import datasets

    save_words(tmp_path / "words", ["red", "green", "blue"])
    rows = {"text": ["red green blue"] * 20, "input_ids": [[3, 2, 1]] * 20}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "colours")
    common = {"data": [str(tmp_path / "colours")], "tokenizer": str(tmp_path / "words"), "seq_len": 2}
    tokens = _open(common)
    assert tokens.train[:6].tolist() == [1, 2, 3, 1, 2, 3] and len(tokens.train) == 57
    assert "joined with nothing between them" in tokens.tokenizer_description
    assert tokens.tokenizer.decode([1, 3]) == "red blue"
    as_tokens = _open(common, {"text_column": "input_ids"})
    assert as_tokens.train[:3].tolist() == [3, 2, 1]
    as_bytes = _open({**common, "tokenizer": "bytes", "document_marks": "eos"})
    assert as_bytes.train[:15].tobytes() == b"red green blue\0"
    unknown = _open({**common, "tokenizer": "bytes", "text_column": "input_ids"})
    assert unknown.train[:4].tolist() == [3, 2, 1, 3]  # zero may be any token of whoever made the ids
    # a model may sample tokens that the tokenizer does not have: the end of a run once failed at it
    assert as_bytes.tokenizer.decode([104, 300, 105]) == "h\ufffdi"
    assert tokens.tokenizer.decode([1, 99]).startswith("red")
    with pytest.raises(ConfigError, match="text_column = 'body'"):
        _open(common, {"text_column": "body"})


def test_a_tokenizer_trained_again_in_place_gives_other_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("red green blue " * 20)
    common = {"data": [str(tmp_path / "a.txt")], "tokenizer": str(tmp_path / "words"), "seq_len": 2}
    save_words(tmp_path / "words", ["red", "green", "blue"])
    before = _open(common)
    save_words(tmp_path / "words", ["blue", "green", "red"])
    after = _open(common)
    assert before.train[:3].tolist() == [1, 2, 3] and after.train[:3].tolist() == [3, 2, 1]
    assert before.digest != after.digest and before.tokenizer.digest != after.tokenizer.digest
    (tmp_path / "words").rename(tmp_path / "moved")
    moved = _open(common, {"tokenizer": str(tmp_path / "moved")})
    assert (moved.digest, moved.tokenizer.digest) == (after.digest, after.tokenizer.digest)
    cached = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".json"]
    assert len(cached) == 2  # one per content


@pytest.mark.parametrize(
    ("special", "setting", "expected"),
    [
        ({}, "auto", [1, 2, 2, 1]),
        ({"eos": "<e>"}, "auto", [1, 2, 9, 2, 1, 9]),
        ({"eos": "<e>", "bos": "<b>"}, "auto", [1, 2, 9, 2, 1, 9]),
        ({"eos": "<e>", "bos": "<b>", "adds_bos": True}, "auto", [8, 1, 2, 9, 8, 2, 1, 9]),
        ({"eos": "<e>", "bos": "<b>"}, "both", [8, 1, 2, 9, 8, 2, 1, 9]),
        ({"eos": "<e>", "bos": "<b>"}, "bos", [8, 1, 2, 8, 2, 1]),
        ({"eos": "<e>", "bos": "<b>", "adds_bos": True}, "none", [1, 2, 2, 1]),
        ({"bos": "<b>"}, "eos", "document_marks = eos: .* has no eos token"),
    ],
)
def test_documents_have_the_ends_that_the_model_knows(tmp_path, special, setting, expected):
    import datasets

    save_words(tmp_path / "words", ["red", "green", "c", "d", "e", "f", "g", "<b>", "<e>"], **special)
    texts = ["red green", "green red"] * 9
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "colours")
    values = {"data": [str(tmp_path / "colours")], "tokenizer": str(tmp_path / "words"), "seq_len": 2}
    values |= {"document_marks": setting, "eval_fraction": 0.0}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            _open(values)
        return
    tokens = _open(values)
    assert np.array_equal(tokens.train, np.tile(expected, 9))


def test_ids_that_have_their_marks_get_no_second_ones(tmp_path):
    import datasets

    save_words(tmp_path / "words", ["red", "<e>"], eos="<e>")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1]] * 9})
    rows.with_format("numpy").save_to_disk(tmp_path / "ids")  # it comes back in the format it was stored in
    tokens = _open(
        {
            "data": [str(tmp_path / "ids")],
            "tokenizer": str(tmp_path / "words"),
            "text_column": "input_ids",
            "seq_len": 2,
            "eval_fraction": 0.0,
        }
    )
    assert np.array_equal(tokens.train, np.tile([1, 2], 18))


def test_the_model_s_folder_brings_its_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("red green " * 60)
    save_words(tmp_path / "model", ["red", "green"])
    values = {"data": [str(tmp_path / "a.txt")], "seq_len": 2}
    found = _open(values, model=str(tmp_path / "model"))
    assert found.train[:2].tolist() == [1, 2]
    assert found.tokenizer_description.startswith(f"tokenizer {tmp_path / 'model'} (3 tokens)")
    for setting, model in (("bytes", str(tmp_path / "model")), ("auto", str(tmp_path)), ("auto", "nano")):
        tokens = _open({**values, "tokenizer": setting}, model=model)
        assert tokens.tokenizer_description == "tokenizer bytes; documents end with token 0"


def test_settings_that_work_but_rarely_as_meant_are_told(tmp_path):
    save_words(tmp_path / "model", ["red"])
    source = find_model("LlamaConfig", {})
    values = {"steps": 20, "seq_len": 4096, "tokenizer": "bytes", "model": str(tmp_path / "model")}
    warmup, length, tokenizer = likely_mistakes(from_values(values), source)
    assert warmup.startswith("warmup = 20 of 20 steps") and "2048 positions" in length
    assert tokenizer.endswith("has one; --tokenizer auto uses it")
    assert likely_mistakes(from_values({"steps": 40, "seq_len": 2048}), source) == []


def test_a_place_that_takes_no_tokens_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some words, more than a sequence of them")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAGGED_FSDP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"data: .* tokens are kept in RAGGED_FSDP_CACHE = .*file/cache"):
        _open({"data": [str(tmp_path / "a.txt")], "seq_len": 4})


def test_rows_of_a_dataset_without_text_are_empty_documents(tmp_path):
    from datasets import Dataset, DatasetDict

    Dataset.from_dict({"text": [None, "one", "", None, "two"]}).save_to_disk(tmp_path / "data")
    values = {"data": [str(tmp_path / "data")], "seq_len": 4, "eval_fraction": 0.0}
    assert _open(values).train.tobytes() == b"\0one\0\0\0two\0"
    DatasetDict({"train": Dataset.from_dict({"text": ["one"]})}).save_to_disk(tmp_path / "parts")
    with pytest.raises(ConfigError, match=r"parts holds several datasets; name one: .*parts/train"):
        _open(values | {"data": [str(tmp_path / "parts")]})
    (tmp_path / "[odd] name.txt").write_text("a name that is no pattern")
    assert len(_open(values | {"data": [str(tmp_path / "[odd] name.txt")]}).train) == 26
