"""Tokenizers of tokenizer.json: the library's ids, special tokens as the folder says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megalite.data.tokenizer import open_tokenizer
from megalite.errors import DataError
from tests.corpus.kit.hugging_face import (
    BOS,
    EOS,
    SPECIAL,
    START,
    TEXTS,
    bytes_tokenizer,
    words_tokenizer,
    write_folder,
)

SAMPLES = [*TEXTS[:3], "", " leading", "tabs\tand\r\nlines ", "中文 ünïcödé \U0001f600", "a" * 5000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf") / "model")


def test_ids_and_texts_are_those_of_transformers(folder: Path):
    ours, stock = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text, batch in zip(SAMPLES, ours.encode_batch(SAMPLES), strict=True):
        ids = stock.encode(text, add_special_tokens=False)
        assert ours.encode(text) == batch.tolist() == ids
        assert batch.dtype == np.int32
        assert ours.decode(ids) == text == stock.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(stock)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (stock.bos_token_id, stock.eos_token_id, None)


def test_special_tokens_never_come_from_text_unless_asked(folder: Path):
    tokenizer = open_tokenizer(folder)
    text = f"{START}user\nhi{EOS}"
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_texts.values())
    assert tokenizer.decode(tokenizer.encode(text)) == text

    ids, spans = tokenizer.encode_special(text)
    stock = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)
    assert ids.tolist() == stock["input_ids"]
    parts = [text[start:stop] for start, stop in spans]
    assert (parts[0], parts[-1]) == (START, EOS)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, special=True) == text
    assert sorted(tokenizer.special_texts) == sorted(SPECIAL)


def test_the_file_finds_what_lies_beside_it_and_has_the_folders_identity(folder: Path):
    by_file, by_folder = open_tokenizer(folder / "tokenizer.json"), open_tokenizer(folder)
    assert by_file.files.sha256 == by_folder.files.sha256
    assert by_file.eos_id == by_folder.eos_id == SPECIAL.index(EOS)


def test_the_identity_is_that_of_the_ids_alone(tmp_path: Path, folder: Path):
    known = open_tokenizer(folder).files.sha256
    other = write_folder(tmp_path / "a", template="{{ messages }}")
    assert open_tokenizer(other).files.sha256 == known
    other = write_folder(tmp_path / "b", eos_token=SPECIAL[3])
    assert open_tokenizer(other).files.sha256 != known


def test_bos_begins_a_document_where_the_tokenizer_puts_it(tmp_path: Path, folder: Path):
    made = bytes_tokenizer(adds_bos=True)
    assert open_tokenizer(folder).prefix_ids == []
    assert open_tokenizer(write_folder(tmp_path / "a", made)).prefix_ids == [0]
    switched_off = write_folder(tmp_path / "b", made, add_bos_token=False)
    assert open_tokenizer(switched_off).prefix_ids == []
    assert open_tokenizer(write_folder(tmp_path / "c", add_bos_token=True)).prefix_ids == [0]


def test_names_in_special_tokens_map_fill_gaps(tmp_path: Path):
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": BOS}}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": EOS, "bos_token": START, "pad_token": SPECIAL[3]})
    )
    tokenizer = open_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 3)


def test_a_truncation_in_the_file_cuts_nothing(tmp_path: Path):
    made = bytes_tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    tokenizer = open_tokenizer(write_folder(tmp_path, made))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize("unk", ["[UNK]", None])
def test_text_that_the_vocabulary_lacks_is_counted(tmp_path: Path, unk: str | None):
    tokenizer = open_tokenizer(write_folder(tmp_path, words_tokenizer(unk)))
    assert tokenizer.drops_unknown == (unk is None)
    text = "The fox 中文 reads ж"
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.unknown_bytes(text, ids) == len("中文ж".encode())
    assert tokenizer.unknown_bytes("The fox", tokenizer.encode_batch(["The fox"])[0]) == 0


def test_what_cannot_be_used_is_refused(tmp_path: Path, folder: Path):
    tokenizer = open_tokenizer(folder)
    with pytest.raises(DataError, match="id 9999 is not in its vocabulary"):
        tokenizer.decode([1, 9999])
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode("a\ud800")

    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"neither tokenizer.json nor tokenizer.model"):
        open_tokenizer(tmp_path / "empty")
    (tmp_path / "broken.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="not a tokenizer"):
        open_tokenizer(tmp_path / "broken.json")

    alone = tmp_path / "alone.json"
    alone.write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match='"eos_token": "TEXT OF THE TOKEN"'):
        _ = open_tokenizer(alone).eos_id
    with pytest.raises(DataError, match="eos_token '<none>' is not in its vocabulary"):
        _ = open_tokenizer(write_folder(tmp_path / "bad", eos_token="<none>")).eos_id
    added = {"500": {"content": "<|more|>"}}
    with pytest.raises(DataError, match=r"adds 1 token that tokenizer.json lacks, '<|more|>'"):
        open_tokenizer(write_folder(tmp_path / "more", added_tokens_decoder=added))


def test_an_identity_takes_no_library(folder: Path):
    code = (
        "import sys; from megalite.data.tokenizer import open_tokenizer\n"
        "from megalite.data.tokenizer_files import read_tokenizer_files\n"
        f"print(read_tokenizer_files({str(folder)!r}).sha256)\n"
        "assert not {'tokenizers', 'sentencepiece'} & set(sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == open_tokenizer(folder).files.sha256
