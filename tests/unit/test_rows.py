"""Rows of data sets."""

import json

import pytest

from redrb import ConfigError
from redrb.recipe import data_rows

ROWS = [{"question": "one\u2028line", "answer": "1"}, {"question": "two", "answer": "2"}]


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "rows.jsonl"
    found.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n")
    return found


def test_rows_of_a_file(file):
    assert data_rows(str(file)) == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a"', "line 2 of .*rows.jsonl is no JSON"),
        ("[1]", "line 1 of .* is no JSON object"),
        ("\n", "has no rows"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        data_rows(str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        data_rows(str(file.with_name("none.jsonl")))


def test_rows_of_hugging_face_are_read_by_datasets(file, monkeypatch):
    asked = []
    datasets = pytest.importorskip("datasets")

    def load(name, configuration, *, split):
        asked.append((name, configuration, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert data_rows("openai/gsm8k:main", "test[:2]") == ROWS
    assert data_rows("some/name") == ROWS
    assert asked == [("openai/gsm8k", "main", "test[:2]"), ("some/name", None, "train")]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("redrb.checks.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="datasets is not installed: pip install"):
        data_rows("openai/gsm8k:main")
