"""The tokenizer: text comes back as it was, control ids never come from text, sizes are checked."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megalite.corpus.tokenizer_training import (
    BOS_ID,
    EOS_ID,
    MAX_LINE_BYTES,
    PAD_ID,
    UNK_ID,
    LineSample,
    cut_line,
    train_tokenizer,
)
from megalite.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_of
from megalite.data.tokenizer_files import model_files
from megalite.errors import DataError
from tests.data.kit import PROPERTY

TEXT = Path(io.__file__).read_text(encoding="utf-8") + Path(__file__).read_text(encoding="utf-8")
VOCAB_SIZE = 500
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<0x0A>", " \u2047 "]
CODE = "\tif x:\r\n\n\n    y  =  '\u00e9\u65e5\U0001f600'   # \ufeff\u2585\x00 \n  "


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    content, report = train_tokenizer([TEXT], VOCAB_SIZE, request.param)
    assert report.vocab_size == VOCAB_SIZE
    return tokenizer_of(model_files(content, "test.model"))


def test_ids_and_size(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (BOS_ID, EOS_ID, PAD_ID)


@pytest.mark.parametrize("text", [TEXT, CODE, *SPECIAL, " ", "\n", "  a", "a  ", ""])
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@PROPERTY
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_one_character_that_does_not_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"


@pytest.mark.parametrize("text", [*SPECIAL, "a</s>b<s>c<pad></s>"])
def test_text_never_becomes_a_control_id(tokenizer: Tokenizer, text: str) -> None:
    assert not {UNK_ID, BOS_ID, EOS_ID, PAD_ID} & set(tokenizer.encode(text))


TRICKY = [
    *SPECIAL,
    "  ",
    "\n\n",
    "\t",
    "\u2581",
    "\ufeff",
    "\x00",
    "\u00e9",
    "e\u0301",
    "def ",
    "12345",
]


@PROPERTY
@given(
    texts=st.lists(
        st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=9)), max_size=9).map("".join),
        max_size=5,
    )
)
def test_encoding_any_text_is_the_library_on_the_whole_document(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files.content)
    found = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in found] == [library.encode(text) for text in texts]
    assert not {UNK_ID, BOS_ID, EOS_ID, PAD_ID} & {int(i) for ids in found for i in ids}


def test_encoding_long_text_is_the_library_on_the_whole_document(tokenizer: Tokenizer) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files.content)
    assert tokenizer.encode(TEXT) == library.encode(TEXT)
    assert tokenizer.encode("") == []


def test_decoding_control_ids_and_half_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f600")
    assert tokenizer.decode([BOS_ID, *ids, EOS_ID, PAD_ID]) == "a\U0001f600"
    assert tokenizer.decode(ids[:-1]).startswith("a\ufffd")
    for bad in (VOCAB_SIZE, -1):
        with pytest.raises(DataError, match=f"id {bad} is not in its vocabulary of {VOCAB_SIZE}"):
            tokenizer.decode([5, bad])


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_gives_the_same_result_each_time(model_type: Literal["bpe", "unigram"]) -> None:
    first, _ = train_tokenizer([TEXT], 400, model_type, 10_000)
    second, _ = train_tokenizer([TEXT], 400, model_type, 10_000)
    assert first == second


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_too_large_a_vocabulary_names_the_largest_feasible(
    model_type: Literal["bpe", "unigram"],
) -> None:
    text = "hello world\nhello there\n" * 20
    with pytest.raises(DataError, match=r"vocab_size=5000 .* largest feasible is \d+") as caught:
        train_tokenizer([text], 5000, model_type)
    largest = int(str(caught.value).split("largest feasible is ")[1].split(":")[0])
    content, _ = train_tokenizer([text], largest, model_type)
    assert tokenizer_of(model_files(content, "x")).vocab_size == largest
    with pytest.raises(DataError, match=f"largest feasible is {largest}"):
        train_tokenizer([text], largest + 1, model_type)


def test_too_small_a_vocabulary_names_the_smallest_feasible() -> None:
    with pytest.raises(DataError, match="vocab_size=260; must be at least 261"):
        train_tokenizer([TEXT], 260)
    with pytest.raises(DataError, match=r"vocab_size=261 .* smallest feasible is \d+"):
        train_tokenizer([TEXT], 261)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(DataError, match="model_type='word'"):
        train_tokenizer([TEXT], 400, "word")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no text to train"):
        train_tokenizer(["", "\n\n"], 400)


def test_long_lines_are_cut_not_skipped() -> None:
    # "q" stands in the long line only: a skipped line would leave it out of the vocabulary
    long = "q" * 100_000
    content, report = train_tokenizer(["hello world foo bar\n" * 50 + long], 280)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert library.piece_to_id("q") != UNK_ID
    assert (report.num_lines_cut, report.skipped_bytes) == (1, 0)
    assert report.sample_bytes == report.corpus_bytes == 19 * 50 + 100_000


def test_share_of_skipped_bytes_is_reported() -> None:
    content, report = train_tokenizer(["hello world\n" * 50 + "zz\u2585zz\n" * 50], 275)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert library.piece_to_id("z") != UNK_ID
    assert (report.skipped_bytes, report.corpus_bytes) == (150, 50 * (11 + 7))
    assert report.skipped_share == pytest.approx(150 / 900)


@PROPERTY
@given(text=st.text(st.sampled_from("ab\u00e9\u65e5\U0001f600"), max_size=9).map(lambda t: t * 700))
def test_lines_are_cut_between_characters(text: str) -> None:
    parts = list(cut_line(text.encode()))
    assert "".join(part.decode() for part in parts) == text
    assert all(0 < len(part) <= MAX_LINE_BYTES for part in parts)


def test_sample_is_bounded_ordered_and_the_same_each_time() -> None:
    lines = [f"line {number:05d}" for number in range(20_000)]
    samples = []
    for step in (1, 7):  # however the stream is cut into documents
        sample = LineSample(10_000)
        for start in range(0, len(lines), step):
            sample.add("\n".join(lines[start : start + step]))
        samples.append(sample)
    kept = samples[0].lines()
    assert kept == samples[1].lines() == sorted(kept)
    assert len(kept) == 1000
    assert samples[0].kept_bytes == 10_000
    assert samples[0].corpus_bytes == 200_000
    thirds = [sum(b"line %05d" % bound > part for part in kept) for bound in (6667, 13333)]
    assert 250 < thirds[0] < 420
    assert 580 < thirds[1] < 750


@pytest.mark.parametrize("content", [b"", b"not a model", b"\0" * 100])
def test_files_that_are_no_model_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.model").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.model: not a sentencepiece model"):
        open_tokenizer(tmp_path / "t.model")
    with pytest.raises(DataError, match="cannot be read"):
        open_tokenizer(tmp_path / "missing.model")


def test_model_without_an_end_id_is_refused_when_asked() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 9),
        model_writer=model,
        vocab_size=20,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = tokenizer_of(model_files(model.getvalue(), "foreign.model"))
    with pytest.raises(DataError, match=r"foreign\.model: has no end-of-sentence id"):
        _ = tokenizer.eos_id
    assert tokenizer.pad_id is None


def test_a_model_whose_end_id_is_text_is_refused() -> None:
    """A text that holds such a piece would end a document in its middle."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")[:80]),
        model_writer=model,
        vocab_size=120,
        user_defined_symbols=["</s>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = tokenizer_of(model_files(model.getvalue(), "foreign.model"))
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert library.piece_to_id("</s>") in tokenizer.encode("a</s>b")
    with pytest.raises(DataError, match=r"foreign\.model: has no end-of-sentence id .* control"):
        _ = tokenizer.eos_id


def test_control_pieces_in_marked_text_become_their_ids(tokenizer: Tokenizer) -> None:
    ids, spans = tokenizer.encode_special("<s>hello 中</s>x")
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.eos_id in ids.tolist()
    assert tokenizer.decode(ids, special=True).replace(" ", "") == "<s>hello中</s>x"
    # Each byte of a character that is no piece stands for the whole character.
    assert [tuple(span) for span in spans].count((9, 10)) == 3
