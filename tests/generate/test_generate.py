"""Text from checkpoints: the rules of sampling, and the verb with its options."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from megalite.checkpoint.find import find_checkpoint
from megalite.cli.main import app
from megalite.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_of
from megalite.data.tokenizer_files import model_files
from megalite.errors import ConfigError, DataError
from megalite.generate.generate import Text, generate, load_model
from megalite.generate.pieces import Pieces
from megalite.generate.sampling import Sampling
from tests.corpus.kit import prepare
from tests.pool import RankPool
from tests.train.kit.runs import make_config, train, world_size, write_tokens

VOCAB = 290
FIXTURE = Path(__file__).parent.parent / "fixtures" / "run" / "data" / "tiny.model"
LAYOUTS = ("tp2", "3d")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """The same short run at two layouts, with checkpoints after each step."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text("def f(x):\n\treturn x + 1\n" * 60)
    prepare(str(folder / "text"), str(folder / "data"), vocab_size=VOCAB)
    for layout in LAYOUTS:
        config = make_config(
            folder,
            layout,
            layout,
            model__vocab_size=400,  # a model may have ids that its tokenizer lacks
            data__tokenizer=str(folder / "data.model"),
            train__dtype="float64",
            optimizer__ema_decay=0.5 if layout == "3d" else None,
            train__steps=2,
            checkpoint__interval=1,
        )
        pool.run(train, world_size(config), [(config, None)])
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["generate", *(str(argument) for argument in arguments)])


@pytest.mark.long
def test_the_same_seed_gives_the_same_text_from_any_layout(runs: Path) -> None:
    options = ("--prompt", "def f", "--tokens", 12, "--seed", 3)
    one, again, other_layout = (invoke(runs / name, *options) for name in ("tp2", "tp2", "3d"))
    assert one.exit_code == 0, one.output
    assert one.output == again.output == other_layout.output
    assert one.output.startswith("def f")
    assert invoke(runs / "tp2", *options[:-1], 4).output != one.output


def test_greedy_is_temperature_0_and_top_k_1(runs: Path) -> None:
    greedy = invoke(runs / "tp2", "--greedy", "--tokens", 8)
    assert greedy.exit_code == 0, greedy.output
    for options in (("--temperature", 0), ("--top-k", 1), ("--top-p", 1e-9)):
        assert invoke(runs / "tp2", "--tokens", 8, *options).output == greedy.output


def test_a_checkpoint_or_a_step_may_be_named(runs: Path) -> None:
    options = ("--greedy", "--tokens", 8)
    first = invoke(runs / "tp2", "--step", 1, *options)
    assert first.exit_code == 0, first.output
    named = invoke(runs / "tp2" / "checkpoints" / "step-00000001", *options)
    assert named.output == first.output
    latest = invoke(runs / "tp2" / "checkpoints" / "latest", *options)
    assert latest.output == invoke(runs / "tp2", "--step", 2, *options).output != first.output


def test_text_is_printed_as_it_is_made_and_ctrl_c_keeps_it(runs: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "megalite", "generate", runs / "tp2", "--prompt", "def f",
         "--greedy", "--tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert running.stdout is not None
    begun = running.stdout.read(len("def f") + 3)  # returns only when so much is printed
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    rest, stderr = running.communicate(timeout=120)
    assert (running.returncode, stderr) == (130, b"error: interrupted\n")
    whole = (begun + rest).decode()
    assert whole.startswith("def f")
    assert whole.endswith("\n")


@pytest.fixture(scope="module", params=["own", "stock"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One that megalite trains, and one by the library's defaults, which begins with a space."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text = "def f(x):\n\treturn x + 1\n"
    (folder / "text.txt").write_text(text * 60)
    if request.param == "own":
        prepare(str(folder / "text.txt"), str(folder / "data"), vocab_size=VOCAB)
        return open_tokenizer(folder / "data.model")
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines() * 60),
        model_writer=content,
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        minloglevel=2,
    )
    return tokenizer_of(model_files(content.getvalue(), "stock"))


@given(st.data())
def test_pieces_of_text_never_change_what_was_printed(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """For any ids: control ids, unfinished characters, several spaces, text that is U+FFFD."""
    any_ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    a_text = st.text(max_size=8).map(tokenizer.encode)
    prompt, ids = (data.draw(st.one_of(any_ids, a_text)) for _ in range(2))
    assert "".join(pieces_of(tokenizer, prompt, ids)) == tokenizer.decode(prompt + ids)


def pieces_of(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    pieces = Pieces(tokenizer, prompt)
    return [pieces.add(), *(pieces.add(token) for token in ids), pieces.rest()]


@given(st.data())
def test_a_text_ends_before_the_first_stop_wherever_it_is_cut(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """No part of a stop is ever printed, and nothing before it is lost; prompts have no stops."""
    letters = st.text(alphabet="ab\u4e2d", max_size=12)
    prompt, text = data.draw(letters), data.draw(letters)
    stops = data.draw(st.lists(st.text(alphabet="ab\u4e2d", min_size=1, max_size=3), max_size=3))
    pieces = Pieces(tokenizer, tokenizer.encode(prompt), stops)
    printed = pieces.add()
    whole = tokenizer.encode(prompt) + tokenizer.encode(text)
    for token in tokenizer.encode(text):
        printed += pieces.add(token)
        if pieces.stopped:
            break
    printed += pieces.rest()
    answer = tokenizer.decode(whole)[len(pieces.start) :]
    ends = [answer.find(stop) for stop in stops if stop in answer]
    assert printed == pieces.start + answer[: min(ends, default=len(answer))]
    assert pieces.stopped == bool(ends)


def test_a_character_is_a_piece_when_its_last_byte_is_there(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("f\u4e2d\U0001f600 x\ufffd")
    pieces = pieces_of(tokenizer, [], ids)
    joined = [piece for piece in pieces if piece in ("f", "\u4e2d", "\U0001f600")]
    assert joined == ["f", "\u4e2d", "\U0001f600"]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_the_average_of_the_weights_gives_a_text_of_its_own(runs: Path) -> None:
    options = ("--tokens", 24, "--seed", 1)
    average = invoke(runs / "3d", "--ema", *options)
    assert average.exit_code == 0, average.output
    assert average.output != invoke(runs / "3d", *options).output


def test_prompts_of_a_file_give_json_lines(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def f\n\nreturn x\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f"}\n{"prompt": "return x"}\n')
    options = ("--tokens", 6, "--seed", 5)
    results = [
        invoke(runs / "tp2", "--prompts", tmp_path / f"prompts.{kind}", *options)
        for kind in ("txt", "jsonl")
    ]
    assert results[0].output == results[1].output
    found = [json.loads(line) for line in results[0].output.splitlines()]
    assert [record["prompt"] for record in found] == ["def f", "return x"]
    for index, record in enumerate(found):
        alone = invoke(
            runs / "tp2", "--prompt", record["prompt"], "--tokens", 6, "--seed", 5 + index
        )
        assert alone.output == record["prompt"] + record["completion"] + "\n"


@pytest.mark.long
def test_a_console_of_few_letters_gets_escapes(runs: Path, tmp_path: Path) -> None:
    """And JSON lines are JSON there, too."""
    prompt = "caf\u00e9 \u4e2d\U0001f600"
    (tmp_path / "prompts.txt").write_text(prompt + "\n", encoding="utf-8")
    one = ["--prompts", str(tmp_path / "prompts.txt")]
    for options in (one, ["--prompt", prompt]):
        done = subprocess.run(
            [sys.executable, "-m", "megalite", "generate", runs / "tp2", *options, "--tokens", "2"],
            env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if options is one:
            assert json.loads(done.stdout)["prompt"] == prompt
        else:
            assert done.stdout.startswith(b"caf\xe9 \\u4e2d\\U0001f600")


def test_a_line_of_prompts_ends_where_a_file_has_line_ends(runs: Path, tmp_path: Path) -> None:
    """JSON writers leave U+2028, U+0085 and form feeds as they are inside a text."""
    prompts = ["a\u2028b", "c\u0085d", "e\x0cf"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in prompts)
    )
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    for kind in ("jsonl", "txt"):
        result = invoke(runs / "tp2", "--prompts", tmp_path / f"prompts.{kind}", "--tokens", 1)
        assert result.exit_code == 0, result.output
        found = [json.loads(line)["prompt"] for line in result.output.rstrip("\n").split("\n")]
        assert found == prompts


def test_a_prompt_that_the_tokenizer_changes_is_shown_as_read(runs: Path) -> None:
    result = invoke(runs / "tp2", "--prompt", "def\u2581f", "--tokens", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("def f")
    (own,) = (runs / "tp2").glob("tokenizer-*")
    assert result.stderr == (
        f"warning: tokenizer {own} changes the prompt: 'def\u2581f' comes back as 'def f'\n"
    )
    assert invoke(runs / "tp2", "--prompt", "def \u7231", "--tokens", 1).stderr == ""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts are both given"),
        (["--tokens", "0"], "--tokens=0 needs to be at least 1"),
        (["--temperature", "-1"], "--temperature=-1 needs to be a number of at least 0"),
        (["--temperature", "nan"], "--temperature=nan needs to be a number of at least 0"),
        (["--top-k", "-1"], "--top-k=-1 needs to be at least 0"),
        (["--top-p", "0"], "--top-p=0 needs to be above 0 and at most 1"),
        (["--top-p", "1.5"], "--top-p=1.5 needs to be above 0 and at most 1"),
        (["--seed", "-1"], "--seed=-1 needs to be from 0 to 2^63 - 1"),
        (["--greedy", "--temperature", "1"], "--temperature=1 has no effect with --greedy"),
        (["--greedy", "--top-k", "5"], "--top-k=5 has no effect with --greedy"),
        (["--temperature", "0", "--top-p", "0.5"], "--top-p=0.5 has no effect with --temperature"),
        (["--device", "tpu"], "--device=tpu needs to be cpu or cuda"),
        (["--device", "cuda"], "--device=cuda: this torch sees no CUDA device"),
        (["--prompts", "gone.txt"], "--prompts=gone.txt cannot be read"),
        (["--batch", "4"], "--batch=4 has no effect without --prompts"),
        (["--stop", ""], "--stop is empty"),
        (["--tp", "0"], "--tp=0 needs to be at least 1"),
        (["--tp", "3"], "parallel.tp=3"),
        (["--chat-template", "gone.jinja"], "--chat-template=gone.jinja cannot be read"),
        (["--tokenizer", "gone.model"], "tokenizer gone.model: cannot be read"),
        (["--prompt", ""], "the prompt gives the token ids []"),
        (["--step", "7"], "step-00000007 does not exist; there are: step-00000001, step-00000002"),
        (["--ema"], "holds no average of the weights"),
    ],
)
def test_odd_options_are_refused_by_name(runs: Path, options: list[str], line: str) -> None:
    result = invoke(runs / "tp2", *options)
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert all(text.startswith("error: ") for text in result.stderr.splitlines())


def test_without_a_checkpoint_it_is_refused_in_a_line(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {tmp_path} holds no checkpoint; give a checkpoint, or the folder of a run that "
        "has saved (at its end, on a signal, every checkpoint.interval steps and interval_s "
        "seconds)\n"
    )


def added(model: Any, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    text = Text(prompt, tokens, Sampling(temperature=0), **options)
    return [token for _, token in generate(model, [text])]


def test_it_stops_after_the_end_of_a_document(runs: Path) -> None:
    model, _ = load_model(find_checkpoint(runs / "tp2"))
    first = added(model, [5, 6], 8)
    assert len(first) == 8
    assert added(model, [5, 6], 8, end_ids={first[0]}) == first[:1]
    with pytest.raises(DataError, match="must give one or more below 400"):
        added(model, [400], 1)


def test_texts_side_by_side_are_those_of_whole_contexts(runs: Path) -> None:
    """Of several lengths and ends, one longer than the model's context of 16, most beyond it."""
    model, _ = load_model(find_checkpoint(runs / "tp2"))
    prompts = [[5, 6], [7] * 15, list(range(20)), [9], [11, 12, 13]]
    lengths = [30, 4, 6, 1, 16]
    draws = [Sampling(temperature=1.0, top_k=0, seed=number) for number in range(5)]
    want = []
    for prompt, tokens, draw in zip(prompts, lengths, draws, strict=True):
        text, generator = list(prompt), draw.generator()
        for _ in range(tokens):
            logits = model.logits(torch.tensor(text[-16:]))[-1]
            text.append(draw.pick(logits, generator))
        want.append(text)
    texts = [Text(*each) for each in zip(prompts, lengths, draws, strict=True)]
    assert sum(1 for _ in generate(model, texts)) == sum(lengths)
    assert [text.tokens for text in texts] == want


def test_prompts_are_answered_in_batches_of_any_size(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def f\nreturn x\nx\nx + 1 +\ndef\n")
    options = ("--prompts", tmp_path / "prompts.txt", "--tokens", 20, "--seed", 5)
    outputs = {invoke(runs / "tp2", *options, "--batch", size).output for size in (1, 2, 8)}
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 5


def test_a_stop_ends_the_text_and_is_left_out(runs: Path) -> None:
    options = ("--greedy", "--tokens", 40, "--prompt", "def")
    whole = invoke(runs / "tp2", *options).output
    stop = whole[10:12]
    cut = invoke(runs / "tp2", *options, "--stop", stop, "--stop", "\u4e2d")
    assert cut.exit_code == 0, cut.output
    assert cut.output == whole[: whole.index(stop, len("def"))] + "\n"


TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ message.role }}: {{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:{% endif %}"""


def test_a_chat_prints_the_answer_alone(runs: Path, tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": TEMPLATE, **names}))
    chats = [[{"role": "user", "content": "def f"}]]
    chats.append([{"role": "system", "content": "x"}, *chats[0]])
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    options = ("--chat-template", config, "--greedy", "--tokens", 9)
    lines = invoke(runs / "tp2", "--prompts", tmp_path / "chats.jsonl", *options)
    assert lines.exit_code == 0, lines.output
    found = [json.loads(line) for line in lines.output.splitlines()]
    assert [line["messages"] for line in found] == chats
    one = invoke(runs / "tp2", "--prompt", "def f", *options)
    assert one.output == found[0]["completion"] + "\n"

    # By hand: the names of control ids in the chat's text are these ids.
    tokenizer = open_tokenizer(runs / "data.model")
    model, _ = load_model(find_checkpoint(runs / "tp2"))
    controls = tokenizer.special_texts
    text = tokenizer.encode("user: def f"), tokenizer.encode("\nassistant:")
    prompt = [controls["<s>"], *text[0], controls["</s>"], *text[1]]
    ids = [prompt[-1], *added(model, prompt, 9, end_ids={tokenizer.eos_id})]
    assert tokenizer.decode(ids)[1:] == found[0]["completion"]


def test_tensor_parallel_ranks_write_what_one_process_does(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def f\nreturn x\nx\n")
    options = ["--prompts", str(tmp_path / "prompts.txt"), "--tokens", "20", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "megalite", "generate", runs / "3d", *options, "--tp", "2"],
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == invoke(runs / "3d", *options).output


def test_a_copied_run_has_its_tokenizer(runs: Path, tmp_path: Path) -> None:
    """Nothing but the run folder; a damaged or foreign file is refused."""
    shutil.copytree(runs / "3d", tmp_path / "run")
    (runs / "data.model").rename(runs / "away.model")
    options = ("--greedy", "--tokens", 8)
    try:
        copied = invoke(tmp_path / "run", *options)
        (own,) = (tmp_path / "run").glob("tokenizer-*")
        assert (own / "tokenizer.model").read_bytes() == (runs / "away.model").read_bytes()
        own.rename(tmp_path / "other")
        gone = invoke(tmp_path / "run", *options)
        named = invoke(tmp_path / "run", *options, "--tokenizer", tmp_path / "other")
        own.mkdir()
        shutil.copyfile(FIXTURE, own / "tokenizer.model")
        damaged = invoke(tmp_path / "run", *options)
    finally:
        (runs / "away.model").rename(runs / "data.model")
    assert copied.exit_code == named.exit_code == 0, (copied.output, named.output)
    assert copied.output == named.output == invoke(runs / "3d", *options).output
    assert gone.exit_code == damaged.exit_code == 2
    assert "the run's tokenizer is neither in its folder nor at data.tokenizer=" in gone.stderr
    assert f"error: tokenizer {own} (sha256 " in damaged.stderr


def test_without_a_tokenizer_it_is_refused_with_the_remedy(tmp_path: Path, pool: RankPool) -> None:
    write_tokens(tmp_path / "data", 8)
    config = make_config(tmp_path, "speechless", train__steps=0)
    pool.run(train, 1, [(config, None)])
    result = invoke(tmp_path / "speechless")
    assert result.exit_code == 2
    assert "give --tokenizer FILE, or resume it with data.tokenizer=FILE" in result.stderr


LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    everything = Sampling(temperature=1.0, top_k=0).probabilities(LOGITS)
    assert torch.allclose(everything, LOGITS.double().softmax(0))
    two = Sampling(temperature=1.0, top_k=2).probabilities(LOGITS)
    assert two.tolist() == [0, 0.5, 0, 0.5, 0]
    most = Sampling(temperature=1.0, top_k=0, top_p=0.85).probabilities(LOGITS)
    assert most.nonzero().flatten().tolist() == [1, 2, 3]
    half = Sampling(temperature=1.0, top_k=0, top_p=0.3).probabilities(LOGITS)
    assert half.tolist() == [0, 1, 0, 0, 0]


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    st.floats(0.01, 100),
    st.integers(0, 15),
    st.floats(0.001, 1.0),
)
def test_probabilities_are_a_distribution_over_the_likeliest(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    x = torch.tensor(logits, dtype=torch.float64)
    found = Sampling(temperature, top_k, top_p).probabilities(x)
    assert float(found.sum()) == pytest.approx(1.0)
    kept = found > 0
    plain = ((x - x.max()) / temperature).softmax(0)
    assert float(plain[kept].max()) == float(plain.max())
    assert int(kept.sum()) <= (top_k or len(logits))
    assert not bool((~kept & (plain > plain[kept].min())).any())


def test_all_ranges_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=float("inf"), top_k=-1, top_p=2.0, seed=-1)
    assert len(caught.value.problems) == 4
