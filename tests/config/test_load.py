"""Reading configs: precedence, origins, and a readable line for everything that can be mistyped."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.load import load_config
from megalite.config.names import keys, nearest
from megalite.errors import ConfigError

MINIMAL = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
ffn_hidden_size = 64
vocab_size = 97
[data]
seq_length = 16
[train]
steps = 3
global_batch = 4
"""


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value.problems


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


def test_a_minimal_file_loads_with_defaults(minimal: Path) -> None:
    loaded = load_config(minimal)
    assert loaded.config.model.num_layers == 2
    assert loaded.config.optimizer.lr == 3e-4
    assert loaded.origins["model.num_layers"] == str(minimal)
    assert loaded.origins["optimizer.lr"] == "default"
    assert set(loaded.origins) == set(keys())


def test_what_follows_from_a_written_setting_is_derived(minimal: Path) -> None:
    loaded = load_config(minimal, ["checkpoint.interval=0"])
    assert loaded.config.checkpoint.interval_s == 0
    assert loaded.origins["checkpoint.interval_s"] == "derived"
    both = load_config(minimal, ["checkpoint.interval=0", "checkpoint.interval_s=60"])
    assert (both.config.checkpoint.interval_s, both.origins["checkpoint.interval_s"]) == (
        60,
        "override",
    )


def test_override_beats_file_beats_base_beats_default(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    base = write(tmp_path / "models", MINIMAL, "base.toml")
    run = write(tmp_path, 'base = "models/base.toml"\n[train]\nsteps = 7\nglobal_batch = 8\n')
    loaded = load_config(run, ["train.steps=9"])
    assert (loaded.config.train.steps, loaded.config.train.global_batch) == (9, 8)
    assert loaded.config.data.seq_length == 16
    assert loaded.origins["train.steps"] == "override"
    assert loaded.origins["train.global_batch"] == str(run)
    assert loaded.origins["data.seq_length"] == f"base {base}"
    assert loaded.origins["train.seed"] == "default"


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    # Each path is seen from the file that names it, and each value keeps the file it came from.
    first = write(tmp_path, MINIMAL + "seed = 1\nmicro_batch = 2\n", "first.toml")
    (tmp_path / "models").mkdir()
    second = write(
        tmp_path / "models", 'base = "../first.toml"\n[train]\nseed = 2\nsteps = 9\n', "second.toml"
    )
    third = write(tmp_path, 'base = "models/second.toml"\n[train]\nsteps = 11\n')
    loaded = load_config(third)
    train = loaded.config.train
    assert (train.micro_batch, train.seed, train.steps) == (2, 2, 11)
    origins = [loaded.origins[f"train.{key}"] for key in ("micro_batch", "seed", "steps")]
    assert origins == [f"base {first}", f"base {second}", str(third)]


def test_a_circle_of_bases_is_refused_with_its_files(tmp_path: Path) -> None:
    a = write(tmp_path, 'base = "b.toml"\n' + MINIMAL, "a.toml")
    b = write(tmp_path, 'base = "./a.toml"\n', "b.toml")
    run = write(tmp_path, 'base = "a.toml"\n')
    circle = f"{run} -> {a} -> {b} -> {a}"
    assert problems(run) == [f"{run}: its bases form a circle, {circle}; remove one of them"]
    (tmp_path / "link.toml").symlink_to(run)
    own = write(tmp_path, f'base = "link.toml"\n{MINIMAL}')
    assert problems(own) == [
        f"{own}: its bases form a circle, {own} -> {tmp_path / 'link.toml'}; remove one of them"
    ]


@pytest.mark.parametrize("base", ["3", '["a.toml"]'])
def test_base_must_be_a_file_name(tmp_path: Path, base: str) -> None:
    path = write(tmp_path, f"base = {base}\n{MINIMAL}")
    assert problems(path) == [f"{path}: base={base} needs to be a file name in quotes"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone.toml"
    hint = "; `megalite configs` lists those that come with megalite"
    assert problems(gone) == [f"cannot read config {gone}: No such file or directory{hint}"]
    run = write(tmp_path, 'base = "gone.toml"\n' + MINIMAL)
    assert problems(run) == [
        f"cannot read config {gone}: No such file or directory{hint} (the base that {run} names)"
    ]
    assert problems(tmp_path) == [f"cannot read config {tmp_path}: Is a directory"]
    run = write(tmp_path, 'base = "\\u0000"\n' + MINIMAL)
    (problem,) = problems(run)
    assert "embedded null byte in its name" in problem
    assert problem.endswith(f"(the base that {run} names)")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[train]\nsteps = 1\nsteps = 2\n", "line 3: 'steps = 2'", "already set further up"),
        ("[train]\n[data]\n[train]\n", "line 3: '[train]'", "already set further up"),
        ("[train]\nsteps = \n", "line 2: 'steps ='", "Invalid value"),
        ("[train]\nsplit = [1", "end of file", "Unclosed array"),
        ("!!python/object:os.system ls\n", "line 1", ""),
    ],
)
def test_toml_errors_name_file_and_line(tmp_path: Path, text: str, line: str, reason: str) -> None:
    path = write(tmp_path, text)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}, {line}")
    assert reason in problem


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9" * 5000, "{path}: a whole number has too many digits; use at most "
         "18446744073709551615"),
        ("[" * 3000 + "]" * 3000, "{path}: lists or tables are nested too deeply to be read"),
        ("9" * 30, "train.steps ({path}) has a whole number of 100 bits; use at most 64, "
         "that is 18446744073709551615"),
        ("[{a = 0x1" + "0" * 5000 + "}]", "train.steps ({path}) has a whole number of 20001 bits; "
         "use at most 64, that is 18446744073709551615"),
        ("1e" + "9" * 30, "train.steps=inf ({path}) needs an integer"),
        ("1e-" + "9" * 30, "train.steps=0.0 ({path}) needs an integer; write 0"),
    ],
)  # fmt: skip
def test_numbers_and_lists_beyond_all_bounds_are_refused(
    tmp_path: Path, value: str, reason: str
) -> None:
    path = write(tmp_path, MINIMAL.replace("steps = 3", f"steps = {value}"))
    assert problems(path) == [reason.format(path=path)]


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000])
def test_an_override_beyond_all_bounds_is_refused(minimal: Path, value: str) -> None:
    assert problems(minimal, f"train.steps={value}") == [
        f'train.steps="{value}" (override) needs an integer'
    ]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'name = "\xe9"\n')
    assert problems(path) == [f"{path}: not UTF-8 text (byte 8); TOML is UTF-8"]


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(path).config.train.steps == 3


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("train.stepz", "train.steps"),
        ("train.micro-batch", "train.micro_batch"),
        ("parallel.sequence-parallel", "parallel.sequence_parallel"),
        ("model.numlayers", "model.num_layers"),
        ("train.SEED", "train.seed"),
        ("train.seq_length", "data.seq_length"),
        ("optimizer.grad_clip", "optimizer.clip_grad"),
        ("parallel.schedule", "pipeline.schedule"),
        ("optimiser.lr", "optimizer.lr"),
    ],
)
def test_unknown_override_names_the_nearest_key(minimal: Path, name: str, meant: str) -> None:
    assert problems(minimal, f"{name}=1") == [
        f"unknown key {name} (override); did you mean {meant}?"
    ]


def test_unknown_key_in_file_and_base_names_where_it_is(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "sed = 3\n", "base.toml")
    run = write(
        tmp_path, 'base = "base.toml"\n[train]\nlr = 1\n[parallel]\nsequence-parallel = 1\n'
    )
    assert problems(run) == [
        f"unknown key train.sed (base {base}); did you mean train.seed?",
        f"unknown key train.lr ({run}); did you mean optimizer.lr?",
        f"unknown key parallel.sequence-parallel ({run}); did you mean parallel.sequence_parallel?",
    ]


def test_unknown_section_names_the_nearest_one(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "[optimiser]\nlr = 1\n[zzz]\n")
    first, second = problems(path)
    assert first == f"unknown section [optimiser] ({path}); did you mean [optimizer]?"
    assert second.startswith(f"unknown section [zzz] ({path}); sections are model, parallel,")


def test_a_key_like_no_other_lists_what_the_section_has(minimal: Path) -> None:
    (line,) = problems(minimal, "log.zzz=1")
    assert line == (
        "unknown key log.zzz (override); [log] has interval, format, param_stats_interval, "
        "hardware, tensorboard"
    )


def test_a_key_of_several_sections_names_them_all() -> None:
    assert nearest("train.interval") == ["eval.interval", "checkpoint.interval", "log.interval"]


def test_every_key_is_nearest_to_itself() -> None:
    assert all(nearest(name)[0] == name for name in keys())


def test_a_missing_key_is_not_reported_beside_its_misspelling(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("hidden_size = 32", "hidden-size = 32"))
    assert problems(path) == [
        f"unknown key model.hidden-size ({path}); did you mean model.hidden_size?"
    ]


def test_missing_keys_say_where_they_go(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("steps = 3", "").replace("[data]\nseq_length = 16", ""))
    assert problems(path) == [
        "data.seq_length is not set; put seq_length = VALUE under [data] "
        "or give data.seq_length=VALUE",
        "train.steps is not set; put steps = VALUE under [train] or give train.steps=VALUE",
    ]


def test_a_section_that_is_not_there_gets_one_line(tmp_path: Path) -> None:
    head, _, tail = MINIMAL.partition("[data]")
    path = write(tmp_path, "[nonsense]\nx = 1\n[data]" + tail)
    unknown, missing = problems(path)
    assert unknown.startswith(f"unknown section [nonsense] ({path}); sections are model, ")
    assert missing == (
        "section [model] is missing; it needs num_layers, hidden_size, num_heads, "
        "ffn_hidden_size, vocab_size"
    )
    path = write(tmp_path, head.replace("[model]", "[transformer]") + "[data]" + tail)
    assert problems(path) == [
        f"unknown section [transformer] ({path}); did you mean [model]?",
    ]


def test_a_section_inside_a_section(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + '[log.wandb]\nproject = "p"\ntags = ["a", 3]\n')
    assert problems(minimal) == [
        f"log.wandb.tags[1]=3 ({minimal}) needs a text in quotes",
    ]
    assert load_config(minimal, ['log.wandb.tags=["b"]']).config.log.wandb.project == "p"
    assert problems(minimal, "log.wandb.tags=[]", "log.wandb.projet=x") == [
        "unknown key log.wandb.projet (override); did you mean log.wandb.project?"
    ]


SPLITS = 'use for example [0.98, 0.02], "98,2" or "969,30,1"'


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.dtype=bf16", 'train.dtype="bf16" (override) needs \'float32\', \'bfloat16\', '
         "'float16' or 'float64'; did you mean bfloat16?"),
        ("log.format=nemo", 'log.format="nemo" (override) needs \'megalite\' or '
         "'megatron'"),
        ('train.steps="3"', 'train.steps="3" (override) needs an integer; '
         "write it without quotes: 3"),
        ("train.steps=three", 'train.steps="three" (override) needs an integer'),
        ("train.steps=3.0", "train.steps=3.0 (override) needs an integer; write 3"),
        ("train.steps=true", "train.steps=true (override) needs an integer"),
        ("train.steps=-1", "train.steps=-1 (override) needs to be at least 0"),
        ("train.steps=none", 'train.steps="none" (override) needs an integer'),
        ("optimizer.lr=true", "optimizer.lr=true (override) needs a number"),
        ("optimizer.lr=inf", "optimizer.lr=inf (override) needs a finite number"),
        ("optimizer.lr=nan", "optimizer.lr=nan (override) needs a finite number"),
        ('train.tokens="1.5M"', 'train.tokens="1.5M" (override) needs an integer; write 1.5e6'),
        ("train.tokens=30min", 'train.tokens="30min" (override) needs an integer'),
        ("checkpoint.interval_s=30m", 'checkpoint.interval_s="30m" (override) needs a number; '
         "write 1800"),
        ("checkpoint.interval_s=1.5h", 'checkpoint.interval_s="1.5h" (override) needs a number; '
         "write 5400"),
        ("train.timeout_s=600s", 'train.timeout_s="600s" (override) needs a number; write 600'),
        ('log.wandb.timeout_s="20"', 'log.wandb.timeout_s="20" (override) needs a number; '
         "write it without quotes: 20"),
        ("train.timeout_s=1k", 'train.timeout_s="1k" (override) needs a number'),
        ("optimizer.clip_grad=0", "optimizer.clip_grad=0 (override) needs to be greater than 0, "
         'or "none"'),
        ("parallel.dp=-1", 'parallel.dp=-1 (override) needs to be at least 1, or "none"'),
        ("eval.batches=0", 'eval.batches=0 (override) needs to be at least 1, or "none"'),
        ("optimizer.eps=0", "optimizer.eps=0 (override) needs to be greater than 0"),
        ("optimizer.beta1=1", "optimizer.beta1=1 (override) needs to be less than 1"),
        ("optimizer.zero=true", "optimizer.zero=true (override) needs 0 or 1"),
        ("optimizer.zero=1.0", "optimizer.zero=1.0 (override) needs 0 or 1"),
        ("optimizer.zero=3", "optimizer.zero=3 (override) needs 0 or 1"),
        ("parallel.sequence_parallel=1", "parallel.sequence_parallel=1 (override) "
         "needs true or false; write true"),
        ("parallel.stage_layers=[1, -1]", "parallel.stage_layers[1]=-1 (override) "
         "needs to be at least 0"),
        ("parallel.stage_layers=2", "parallel.stage_layers=2 (override) needs a list, "
         "for example [1, 2]"),
        ("data.split=[0.9]", "data.split=[0.9] (override) needs 2 or 3 numbers "
         f"(train, validation, test); {SPLITS}"),
        ("data.split=[1, 1, 1, 1]", "data.split=[1, 1, 1, 1] (override) needs 2 or 3 "
         f"numbers (train, validation, test); {SPLITS}"),
        ("data.split=98;2", 'data.split="98;2" (override) has \'98;2\', which is no number; '
         f"{SPLITS}"),
        ("data.split=98,-2", 'data.split="98,-2" (override) has -2 as share of validation, '
         f"which is no share; {SPLITS}"),
        ("data.split=[true, 0.5]", "data.split=[true, 0.5] (override) has True, which is no "
         f"number; {SPLITS}"),
        ('data.sources=[{path = "a", wieght = 1}]', "data.sources[0] (override) has no setting "
         "'wieght'; remove it"),
        ("data.sources=[{weight = 1}]", "data.sources[0]={weight = 1} (override) has no path; "
         "add it"),
        ('data.sources=[{path = "a", weight = -1}]', "data.sources[0].weight=-1 (override) needs "
         "to be at least 0"),
        ('data.sources=[{path = "a.idx"}]', 'data.sources[0].path="a.idx" (override) names the '
         "pair PREFIX.bin, PREFIX.idx; write 'a'"),
        ("data.split=[0.9, 0.2]", "data.split=[0.9, 0.2] (override) needs a positive train share "
         f"and shares that add up to 1, got 0.9 + 0.2 = 1.1; {SPLITS}"),
        ("data.path=corpus.bin", 'data.path="corpus.bin" (override) names the pair PREFIX.bin, '
         "PREFIX.idx; write 'corpus'"),
        ('data.path=""', 'data.path="" (override) must not be empty'),
        ("optimizer.lr_schedule=cosin", 'optimizer.lr_schedule="cosin" (override) '
         "needs 'constant', 'linear', 'cosine', 'inverse_sqrt' or 'wsd'; did you mean cosine?"),
        ("name=a/b", 'name="a/b" (override) may have letters, digits, \'_\', \'-\' and \'.\' only, '
         "and may not start with '.' or '-'"),
        ("train.seed=9223372036854775808", "train.seed=9223372036854775808 (override) "
         "needs to be at most 9223372036854775807"),
    ],
)  # fmt: skip
def test_a_wrong_value_gets_one_line(minimal: Path, override: str, line: str) -> None:
    assert problems(minimal, override) == [line]


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("train.steps", "override train.steps has no value"),
        ("train.steps=", "override train.steps has no value"),
        ("=3", "override = has no key"),
        ("--train.steps=3", "--train.steps is no option; write train.steps=VALUE"),
        ("model=3", "override model names a section; write model.KEY=VALUE"),
        ("base=other.toml", "override base: a base can only be named in a file"),
        ("name=a\nseed=2", "override name has characters that cannot be printed"),
        ("train.steps=1979-05-27", "train.steps=1979-05-27 (override): no setting is a date"),
    ],
)  # fmt: skip
def test_a_malformed_override_is_refused(minimal: Path, override: str, start: str) -> None:
    (line,) = problems(minimal, override)
    assert line.startswith(start)


def test_an_override_given_twice_is_refused(minimal: Path) -> None:
    assert problems(minimal, "train.steps=3", "train.steps=5") == [
        "override train.steps is given twice (3 and 5); keep one"
    ]


def test_a_section_where_a_value_belongs_and_the_reverse(tmp_path: Path) -> None:
    path = write(tmp_path, "log = 3\n" + MINIMAL + "[name]\nx = 1\n")
    assert problems(path) == [
        f"log=3 ({path}): log is a section; write [log] and its keys below it",
        f"name={{x = 1}} ({path}) needs a text in quotes",
    ]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps = 5", "steps", 5),
        ("train.steps=1_000", "steps", 1000),
        ("train.dtype=bfloat16", "dtype", "bfloat16"),
        ('train.dtype="bfloat16"', "dtype", "bfloat16"),
        ("train.recompute=none", "recompute", "none"),
        ("train.timeout_s=5", "timeout_s", 5.0),
    ],
)
def test_override_values(minimal: Path, override: str, key: str, value: object) -> None:
    got = getattr(load_config(minimal, [override]).config.train, key)
    assert got == value
    assert type(got) is type(value)


def test_bare_words_for_text_settings_stay_text(minimal: Path) -> None:
    loaded = load_config(minimal, ["name=123", "data.path=data/a=b", "out=true"])
    assert (loaded.config.name, loaded.config.out) == ("123", "true")
    assert loaded.config.data.path == "data/a=b"


@pytest.mark.parametrize("word", ["none", "null", '"none"'])
def test_none_unsets_what_may_be_unset(tmp_path: Path, word: str) -> None:
    path = write(tmp_path, MINIMAL.replace("[data]", '[data]\npath = "x"'))
    loaded = load_config(path, [f"optimizer.clip_grad={word}", f"data.path={word}"])
    assert loaded.config.optimizer.clip_grad is None
    assert loaded.config.data.path is None
    assert loaded.origins["data.path"] == "override"


def test_lists_and_switches_from_the_command_line(minimal: Path) -> None:
    loaded = load_config(
        minimal,
        ["parallel.stage_layers=[0, 2]", "data.split=[1, 0]", "parallel.sequence_parallel=true"],
    )
    assert loaded.config.parallel.stage_layers == [0, 2]
    assert loaded.config.data.split == (1.0, 0.0)
    assert loaded.config.parallel.sequence_parallel is True


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps = 3", 'steps = "3"').replace("num_heads = 4", "num_heads = 0")
    path = write(tmp_path, text + "[evall]\ninterval = 1\n")
    assert problems(path, "train.lr=1", "train.sed=2", "log.interval=x") == [
        f"unknown section [evall] ({path}); did you mean [eval]?",
        "unknown key train.lr (override); did you mean optimizer.lr?",
        "unknown key train.sed (override); did you mean train.seed?",
        f"model.num_heads=0 ({path}) needs to be at least 1",
        f'train.steps="3" ({path}) needs an integer; write it without quotes: 3',
        'log.interval="x" (override) needs an integer',
    ]


def test_a_key_of_one_entry_of_a_list_can_be_overridden(minimal: Path) -> None:
    blend = 'data.sources=[{path = "a", weight = 1}, {path = "b"}]'
    overrides = [blend, "data.sources[1].weight=0.25", "data.sources[0].path=web/new"]
    loaded = load_config(minimal, overrides)
    found = [(source.path, source.weight) for source in loaded.config.data.sources]
    assert found == [("web/new", 1.0), ("b", 0.25)]
    assert loaded.origins["data.sources"] == "override"
    for text, line in (
        ("data.sources[2].weight=1", "override data.sources[2].weight: data.sources has 2 entries;"
         " they are counted from 0"),
        ("eval.sets[0].path=a", "override eval.sets[0].path: eval.sets has 0 entries; they are "
         "counted from 0"),
        ("data.sources[0].wieght=1", "data.sources[0] (override) has no setting 'wieght'; remove "
         "it"),
        ("data.sorces[0].weight=1", "unknown key data.sorces (override); did you mean "
         "data.sources?"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            load_config(minimal, [blend, text])
        assert caught.value.problems == [line]
