"""Conversations: rendered and masked as transformers does, or by prefixes; refused otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.corpus.chat import ChatForm, ChatKeys
from megalite.corpus.merge import merge
from megalite.data.chat_template import ChatTemplate
from megalite.data.dataset import TokenDataset
from megalite.data.inspection import inspect_dataset
from megalite.data.tokenizer import Tokenizer, open_tokenizer
from megalite.errors import DataError
from tests.corpus.kit import prepare
from tests.corpus.kit.hugging_face import END, START, bytes_tokenizer, write_folder

TAGGED = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHATS = [
    [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And 中国? \U0001f600"},
        {"role": "assistant", "content": "北京.\n\nIts name is ünïcödé"},
    ],
    [{"role": "assistant", "content": ""}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": " x " * 300}, {"role": "assistant", "content": "y " * 300}],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("hf")
    made = bytes_tokenizer()
    return {
        name: write_folder(path / name, made, template)
        for name, template in {"tagged": TAGGED, "plain": PLAIN}.items()
    }


def chat_form(
    tokenizer: Tokenizer, keys: ChatKeys, template: Path | None = None, allow_special: bool = False
) -> ChatForm:
    chosen = ChatTemplate.of(tokenizer, template)
    return ChatForm(keys, chosen, tuple(tokenizer.special_texts), allow_special)


def form_of(folder: Path, **options: Any) -> ChatForm:
    return chat_form(open_tokenizer(folder), ChatKeys(messages="messages"), **options)


def write_lines(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows(prefix: str) -> list[tuple[list[int], list[int]]]:
    data = TokenDataset(prefix).indexed
    assert data.loss_mask is not None
    found = []
    for number in range(data.num_documents):
        start, stop = data.document_start(number), data.document_start(number + 1)
        found.append((data.read(start, stop).tolist(), data.loss_mask.read(start, stop).tolist()))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_ids_and_masks_are_those_of_transformers(
    tmp_path: Path, folders: dict[str, Path], workers: int
):
    source = write_lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in CHATS])
    folder, out = folders["tagged"], str(tmp_path / "out")
    form = form_of(folder)
    report = prepare(source, out, key=form, tokenizer=str(folder), num_workers=workers)
    stock = AutoTokenizer.from_pretrained(folder)
    for chat, (ids, mask) in zip(CHATS, rows(out), strict=True):
        wanted: Any = stock.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == wanted["input_ids"]
        assert mask == wanted["assistant_masks"]
        assert mask.count(1) > 0
    info = report.sidecar.loss_mask
    assert info is not None
    assert (info.marked_by, info.template) == ("generation", str(folder))
    assert info.trained_tokens == sum(sum(mask) for _, mask in rows(out))
    assert inspect_dataset(out).good
    assert report.counts.round_trips_exact == len(CHATS)


def test_prefixes_find_the_same_tokens_as_the_tags(tmp_path: Path, folders: dict[str, Path]):
    source = write_lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in CHATS])
    for name, folder in folders.items():
        out = str(tmp_path / name)
        prepare(source, out, key=form_of(folder), tokenizer=str(folder))
    assert rows(str(tmp_path / "plain")) == rows(str(tmp_path / "tagged"))
    sidecar = TokenDataset(tmp_path / "plain").sidecar
    assert sidecar is not None
    assert sidecar.loss_mask is not None
    assert sidecar.loss_mask.marked_by == "prefixes"


def test_the_end_of_turn_is_trained_and_white_space_behind_it_is_not(folders: dict[str, Path]):
    form = form_of(folders["plain"])
    text, spans, fault = form.of_record({"messages": CHATS[0]})
    assert fault is None
    assert spans is not None
    assert [text[start:stop] for start, stop in spans] == [
        f"Paris.{END}",
        f"北京.\n\nIts name is ünïcödé{END}",
    ]


def test_a_template_that_renders_turns_anew_is_refused(folders: dict[str, Path], tmp_path: Path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: "
        "{{ m['content'] if loop.last else m['content'] | upper }}\n{% endfor %}"
    )
    form = form_of(folders["plain"], template=tmp_path / "t.jinja")
    _, _, fault = form.of_record({"messages": CHATS[0]})
    assert str(fault) == ("prefixes differ; turn 2 is rendered in another way where others follow")
    text, spans, fault = form.of_record({"messages": CHATS[0][2:3]})
    assert fault is None
    assert spans is not None
    assert [text[start:stop] for start, stop in spans] == ["assistant: Paris.\n"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"other": 1}, "missing key 'messages'"),
        ({"messages": "hi"}, "not a conversation; 'messages' is no list of some"),
        ({"messages": []}, "not a conversation; 'messages' is no list of some"),
        ({"messages": ["hi"]}, "not a conversation; message 0 is no object"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "role='user' and as content",
        ),
        ({"messages": [{"from": "user", "content": "a"}]}, "message 0 has role=None"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn; its roles are user"),
        (
            {"messages": [{"role": "assistant", "content": f"a{START}b"}]},
            f"special token; it holds '{START}'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a\ufdd0b"}]},
            r"special token; it holds '\ufdd0'",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "template; "),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "lone surrogate"),
    ],
)
def test_bad_conversations_are_faults(
    folders: dict[str, Path], record: dict[str, Any], message: str
):
    text, spans, fault = form_of(folders["tagged"]).of_record(record)
    assert (text, spans) == ("", None)
    assert message.encode(errors="replace") in str(fault).encode(errors="replace")


def test_special_tokens_in_text_become_them_only_when_asked(
    tmp_path: Path, folders: dict[str, Path]
):
    folder = folders["tagged"]
    chat = [{"role": "assistant", "content": f"a{START}b"}]
    form = form_of(folder, allow_special=True)
    source = write_lines(tmp_path / "c.jsonl", [{"messages": chat}])
    prepare(source, str(tmp_path / "out"), key=form, tokenizer=str(folder))
    ((ids, _),) = rows(str(tmp_path / "out"))
    wanted: Any = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat)
    assert ids == wanted["input_ids"]


def test_bad_conversations_stop_or_are_skipped_and_counted(
    tmp_path: Path, folders: dict[str, Path]
):
    records: list[dict[str, Any]] = [
        {"messages": CHATS[0]},
        {"messages": []},
        {"messages": CHATS[2]},
        {"text": "a"},
    ]
    source = write_lines(tmp_path / "c.jsonl", records)
    options: dict[str, Any] = {"key": form_of(folders["plain"]), "tokenizer": str(folders["plain"])}
    with pytest.raises(DataError, match=r"c.jsonl:2: not a conversation; 'messages' is no list"):
        prepare(source, str(tmp_path / "out"), **options)
    report = prepare(source, str(tmp_path / "out"), policy="skip", **options)
    assert report.counts.corpus.skipped == {"not a conversation": 1, "missing key 'messages'": 1}
    assert len(rows(str(tmp_path / "out"))) == 2


def test_pairs_and_other_names_give_the_same_documents(tmp_path: Path, folders: dict[str, Path]):
    folder = folders["tagged"]
    tokenizer = open_tokenizer(folder)
    plain = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    shared = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]
    columns = {"role": ["user", "assistant"], "content": ["a?", "b."]}
    roles = {"human": "user", "gpt": "assistant"}
    shapes: list[tuple[ChatKeys, dict[str, Any]]] = [
        (ChatKeys(messages="m"), {"m": plain}),
        (ChatKeys(messages="m"), {"m": columns}),
        (ChatKeys(prompt="p", response="r"), {"p": "a?", "r": "b."}),
        (ChatKeys(messages="c", role="from", content="value", roles=roles), {"c": shared}),
    ]
    found = {chat_form(tokenizer, keys).of_record(record) for keys, record in shapes}
    assert len(found) == 1
    wrong: list[dict[str, Any]] = [
        {},
        {"prompt": "p"},
        {"messages": "m", "prompt": "p", "response": "r"},
    ]
    for options in wrong:
        with pytest.raises(DataError, match="--messages NAME, or --prompt NAME and --response"):
            ChatKeys(**options)


def test_templates_cannot_leave_the_sandbox(folders: dict[str, Path], tmp_path: Path):
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        (tmp_path / "t.jinja").write_text(source)
        form = form_of(folders["plain"], template=tmp_path / "t.jinja")
        _, _, fault = form.of_record({"messages": CHATS[0]})
        assert fault is not None
        assert fault.kind == "template"


def test_templates_that_are_none_are_refused(folders: dict[str, Path], tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="no template of jinja2"):
        form_of(folders["plain"], template=tmp_path / "t.jinja")
    with pytest.raises(DataError, match="cannot be read"):
        form_of(folders["plain"], template=tmp_path / "none.jinja")
    bare = write_folder(tmp_path / "bare")
    with pytest.raises(DataError, match="has no chat template"):
        form_of(bare)


def trained_sentencepiece(tmp_path: Path) -> Tokenizer:
    (tmp_path / "a.txt").write_text("user asks, the assistant answers.\n" * 200)
    prepare(str(tmp_path / "a.txt"), str(tmp_path / "sp"), vocab_size=300)
    return open_tokenizer(tmp_path / "sp.model")


def test_a_tokenizer_of_megalite_takes_conversations_with_a_template(tmp_path: Path):
    tokenizer = trained_sentencepiece(tmp_path)
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    form = chat_form(tokenizer, ChatKeys(messages="messages"), tmp_path / "t.jinja")
    source = write_lines(tmp_path / "c.jsonl", [{"messages": CHATS[0]}])
    prepare(source, str(tmp_path / "out"), key=form, tokenizer=str(tmp_path / "sp.model"))
    ((ids, mask),) = rows(str(tmp_path / "out"))
    assert ids.count(tokenizer.eos_id) == 5
    chosen = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert chosen.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(chosen).replace(" ", "") == "Paris.北京.\n\nItsnameisünïcödé"


def test_an_interrupted_preparation_of_conversations_goes_on(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megalite.corpus.sources.CHUNK_BYTES", 2000)
    source = write_lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in CHATS * 5])
    options: dict[str, Any] = {"key": form_of(folders["tagged"]), "num_workers": 1}
    options["tokenizer"] = str(folders["tagged"])
    prepare(source, str(tmp_path / "whole"), **options)

    class Stopped(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.done_bytes > 5000:
            raise Stopped

    with pytest.raises(Stopped):
        prepare(source, str(tmp_path / "out"), on_progress=stop, **options)
    report = prepare(source, str(tmp_path / "out"), **options)
    assert 0 < report.num_kept_documents < 15
    for suffix in (".bin", ".idx", ".mask"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()


def test_masks_are_merged(tmp_path: Path, folders: dict[str, Path]):
    options: dict[str, Any] = {"key": form_of(folders["tagged"])}
    options["tokenizer"] = str(folders["tagged"])
    for name, chats in {"a": CHATS[:1], "b": CHATS[1:], "both": CHATS}.items():
        source = write_lines(tmp_path / f"{name}.jsonl", [{"messages": chat} for chat in chats])
        prepare(source, str(tmp_path / name), **options)
    merge(str(tmp_path / "out"), [str(tmp_path / "a"), str(tmp_path / "b")])
    for suffix in (".bin", ".idx", ".mask"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"both{suffix}").read_bytes()
    assert inspect_dataset(str(tmp_path / "out")).good

    (tmp_path / "a.mask").unlink()
    with pytest.raises(DataError, match=r"PREFIX.mask beside it is missing"):
        merge(str(tmp_path / "again"), [str(tmp_path / "a"), str(tmp_path / "b")])


def test_the_command_prepares_and_inspects_conversations(tmp_path: Path, folders: dict[str, Path]):
    shared = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A fox."}]
    source = write_lines(tmp_path / "c.jsonl", [{"conversations": shared}])
    out = str(tmp_path / "out")
    words = ["data", "prepare", source, "--out", out, "--tokenizer", str(folders["plain"])]
    words += ["--messages", "conversations", "--role-key", "from", "--content-key", "value"]
    done = CliRunner().invoke(app, [*words, "--roles", "human=user,gpt=assistant"])
    assert done.exit_code == 0, done.output
    assert "found by what each turn adds" in done.output
    assert f"wrote      {out}.bin .idx .json .mask" in done.output

    seen = CliRunner().invoke(app, ["data", "inspect", out, "--rendered"])
    assert seen.exit_code == 0, seen.output
    assert f"{START}assistant\n⟦A fox.{END}⟧\n" in seen.output
    assert "marked by prefixes" in seen.output
    values = CliRunner().invoke(app, ["data", "inspect", out, "--json"])
    assert json.loads(values.output)["trained_tokens"] > 3

    mask = Path(f"{out}.mask")
    mask.write_bytes(mask.read_bytes()[:-1] + b"\x07")
    damaged = CliRunner().invoke(app, ["data", "inspect", out])
    assert damaged.exit_code == 2
    assert "loss mask: holds bytes other than 0 and 1" in damaged.output

    for more, message in {
        ("--messages", "m", "--vocab-size", "300"): "give --tokenizer",
        ("--roles", "a=b"): "are of conversations",
        ("--messages", "m", "--tokenizer", str(folders["plain"]), "--roles", "a"): "write human=",
        ("--messages", "m", "--tokenizer", str(folders["plain"]), "--key", "k"): "is of texts",
    }.items():
        refused = CliRunner().invoke(app, ["data", "prepare", source, "--out", out + "2", *more])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())


def saved(folder: Path, **options: Any) -> Dataset:
    made = Dataset.from_list([{"messages": chat, "text": f"t{n}"} for n, chat in enumerate(CHATS)])
    made.save_to_disk(folder, **options)
    return made


def test_folders_of_datasets_are_read(tmp_path: Path, folders: dict[str, Path]):
    folder = folders["tagged"]
    saved(tmp_path / "ds", num_shards=2)
    (tmp_path / "ds" / "cache-1.arrow").write_bytes(b"left by a map")
    Dataset.from_list([{"messages": chat} for chat in CHATS]).to_parquet(tmp_path / "p.parquet")
    lines = write_lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in CHATS])
    found = []
    for number, source in enumerate([lines, str(tmp_path / "ds"), str(tmp_path / "p.parquet")]):
        out = str(tmp_path / f"out{number}")
        prepare(source, out, key=form_of(folder), tokenizer=str(folder))
        found.append(rows(out))
    assert found[0] == found[1] == found[2]

    prepare(str(tmp_path / "ds"), str(tmp_path / "texts"), tokenizer=str(folder))
    data = TokenDataset(tmp_path / "texts")
    tokenizer = open_tokenizer(folder)
    texts = [tokenizer.decode(data.indexed.sequence(n)) for n in range(data.num_documents)]
    assert texts == ["t0", "t1", "t2"]


def test_folders_of_datasets_that_would_be_read_wrongly_are_refused(
    tmp_path: Path, folders: dict[str, Path]
):
    made = saved(tmp_path / "ds")
    DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "dict")
    options: dict[str, Any] = {"tokenizer": str(folders["plain"])}
    with pytest.raises(DataError, match=r"holds the splits train, test .* such as .*/train"):
        prepare(str(tmp_path / "dict"), str(tmp_path / "o"), **options)
    prepare(str(tmp_path / "dict" / "train"), str(tmp_path / "o"), **options)

    state = tmp_path / "ds" / "state.json"
    values = json.loads(state.read_text())
    values["_indices_data_files"] = [{"filename": "indices.arrow"}]
    state.write_text(json.dumps(values))
    with pytest.raises(DataError, match="flatten_indices"):
        prepare(str(tmp_path / "ds"), str(tmp_path / "p"), **options)
    for key, message in {"none": "missing key 'none'; it has", "messages": "not a string"}.items():
        with pytest.raises(DataError, match=message):
            prepare(str(tmp_path / "dict" / "train"), str(tmp_path / "q"), key=key, **options)


def test_arrow_files_of_the_older_form_are_read(tmp_path: Path, folders: dict[str, Path]):
    table = pa.table({"text": ["one", None, "two"]})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as w,
    ):
        w.write_table(table)
    out = str(tmp_path / "out")
    report = prepare(str(tmp_path / "a.arrow"), out, tokenizer=str(folders["plain"]), policy="skip")
    assert report.counts.corpus.skipped == {"null": 1}
    assert np.diff(TokenDataset(out).indexed.documents).tolist() == [1, 1]
    (tmp_path / "b.arrow").write_bytes(b"something else")
    with pytest.raises(DataError, match="named as Arrow, but its first bytes are others"):
        prepare(str(tmp_path / "b.arrow"), out + "2", tokenizer=str(folders["plain"]))
