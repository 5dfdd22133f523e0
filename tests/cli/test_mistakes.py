"""Typical mistakes, and words of other frameworks: each is answered by a line that says what to
write, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.frameworks import find_foreign, foreign_words
from megalite.config.load import load_config
from megalite.config.names import flag_problem, keys, nearest, toml_value
from tests.cli.test_main import run_with_data

# what is given on the command line -> the line that answers it
MISTAKES = {
    # words of other frameworks, in any section or none
    "train.batch_size=4": (
        "unknown key train.batch_size (override); that is train.global_batch here"
    ),
    "training.local_batch_size=4": (
        "unknown key training.local_batch_size (override); that is train.micro_batch here "
        "(with a pipeline that is pipeline_parallel_microbatch_size; train.global_batch is "
        "global_batch_size, or local_batch_size x parallel.dp where that is not set)"
    ),
    "parallel.tensor_parallel=2": (
        "unknown key parallel.tensor_parallel (override); that is parallel.tp here"
    ),
    "parallelism.pipeline_parallel_degree=2": (
        "unknown key parallelism.pipeline_parallel_degree (override); that is parallel.pp here"
    ),
    "parallel.ep=2": (
        "unknown key parallel.ep (override); megalite has no expert parallelism yet"
    ),
    "parallel.cp=2": (
        "unknown key parallel.cp (override); megalite has no context parallelism yet; "
        "parallel.sequence_parallel cuts activations over tp"
    ),
    "parallelism.pipeline_parallel_microbatch_size=1": (
        "unknown key parallelism.pipeline_parallel_microbatch_size (override); that is "
        "train.micro_batch here (local_batch_size is several of them, in a pipeline)"
    ),
    "tp_comm_overlap=true": (
        "unknown key tp_comm_overlap (override); that is parallel.overlap_tp here (of "
        "input gradients with weight gradients; on by default)"
    ),
    "model.num_experts=8": (
        "unknown key model.num_experts (override); megalite has no mixtures of experts yet"
    ),
    "optimizer.learning_rate=1e-3": (
        "unknown key optimizer.learning_rate (override); that is optimizer.lr here"
    ),
    "learning-rate=1e-3": "unknown key learning-rate (override); that is optimizer.lr here",
    "train.epochs=3": (
        "unknown key train.epochs (override); megalite has no epochs; give train.steps or "
        "train.tokens"
    ),
    "gradient_accumulation_steps=8": (
        "unknown key gradient_accumulation_steps (override); megalite has no setting for it; it is "
        "train.global_batch / (train.micro_batch x parallel.dp)"
    ),
    "per_device_train_batch_size=2": (
        "unknown key per_device_train_batch_size (override); that is train.micro_batch here"
    ),
    "checkpoint.save_every=3": (
        "unknown key checkpoint.save_every (override); that is checkpoint.interval here"
    ),
    "checkpoint.keep=all": (
        'checkpoint.keep="all" (override) needs an integer; all stay by checkpoint.keep_every=1'
    ),
    "checkpoint.keep=0": (
        "checkpoint.keep=0 (override) needs to be at least 1; all stay by checkpoint.keep_every=1"
    ),
    "eval.iters=3": "unknown key eval.iters (override); that is eval.batches here",
    "validation.steps=3": "unknown key validation.steps (override); that is eval.batches here",
    "checkpoint.async_mode=async": (
        "unknown key checkpoint.async_mode (override); megalite has no saves in the background"
    ),
    "attn_implementation=flash_attention_2": (
        "unknown key attn_implementation (override); that is kernels.attention here (auto is the "
        "backend's own)"
    ),
    "zero_optimization.stage=1": (
        "unknown key zero_optimization.stage (override); that is optimizer.zero here (0 or 1)"
    ),
    "bf16.enabled=true": (
        "unknown key bf16.enabled (override); that is train.dtype here (bfloat16)"
    ),
    "trainer.precision=bf16-mixed": (
        "unknown key trainer.precision (override); that is train.dtype here (float32, bfloat16, "
        "float16 or float64)"
    ),
    "trainer.max_epochs=1": (
        "unknown key trainer.max_epochs (override); megalite has no epochs; give train.steps or "
        "train.tokens"
    ),
    "activation_checkpoint.mode=full": (
        "unknown key activation_checkpoint.mode (override); that is train.recompute here (none, "
        "selective, full or stage)"
    ),
    "model.intermediate_size=64": (
        "unknown key model.intermediate_size (override); that is model.ffn_hidden_size here"
    ),
    "model.num_attention_heads=4": (
        "unknown key model.num_attention_heads (override); that is model.num_heads here"
    ),
    "tokens.batch_accumulation_per_replica=4": (
        "unknown key tokens.batch_accumulation_per_replica (override); megalite has no setting for "
        "it; it is train.global_batch / (train.micro_batch x parallel.dp)"
    ),
    "float8.enable_fsdp_float8_all_gather=true": (
        "unknown key float8.enable_fsdp_float8_all_gather (override); megalite has no FP8 yet; "
        "train.dtype=bfloat16"
    ),
    "max_grad_norm=1.0": "unknown key max_grad_norm (override); that is optimizer.clip_grad here",
    "validation.dataset=c4_validation": (
        "unknown key validation.dataset (override); that is eval.sets here (a name and a path "
        "each)"
    ),
    "validation.dataset_path=data/c4": (
        "unknown key validation.dataset_path (override); that is eval.sets here (a name and a "
        "path each)"
    ),
    "validation.enable=true": (
        "unknown key validation.enable (override); that is eval.interval here (steps; 0 is off)"
    ),
    "lr_scheduler.decay_type=linear": (
        "unknown key lr_scheduler.decay_type (override); that is optimizer.wsd_decay_shape here "
        "(linear, cosine or 1-sqrt; with optimizer.lr_schedule=wsd)"
    ),
    "lr_scheduler.decay_ratio=0.2": (
        "unknown key lr_scheduler.decay_ratio (override); that is optimizer.wsd_decay_steps "
        "here (with lr_schedule=wsd, a number of steps)"
    ),
    "checkpoint.enable=false": (
        "unknown key checkpoint.enable (override); that is checkpoint.interval here (steps; 0 "
        "saves at the end alone)"
    ),
    "checkpoint.export_dtype=bfloat16": (
        "unknown key checkpoint.export_dtype (override); megalite has no choice of it; "
        "checkpoints are safetensors files with weights in float32"
    ),
    "model.flavor=debugmodel": (
        "unknown key model.flavor (override); megalite has no named sizes; take one that "
        '`megalite configs` lists, such as base = "models/llama-tiny" for debugmodel'
    ),
    "model.converters=float8": (
        "unknown key model.converters (override); megalite has no converters of models; FP8 is "
        "not there yet, train.dtype=bfloat16 is"
    ),
    "job.description=llama": (
        "unknown key job.description (override); megalite has no description of a run; name and "
        "log.wandb.tags are its labels"
    ),
    "job.print_args=true": (
        "unknown key job.print_args (override); megalite has no switch for it; --print-config "
        "prints the settings, config.toml in the run folder has them"
    ),
    "job.config_file=llama.toml": (
        "unknown key job.config_file (override); megalite has no option for it; the config is "
        "the first word: megalite train CONFIG"
    ),
    "metrics.save_tb_folder=tb": (
        "unknown key metrics.save_tb_folder (override); megalite has no setting for it; "
        "log.tensorboard writes the folder tensorboard of the run"
    ),
    "metrics.disable_color_printing=true": (
        "unknown key metrics.disable_color_printing (override); megalite has no switch for it; "
        "lines have no colours"
    ),
    "optimizer.implementation=foreach": (
        "unknown key optimizer.implementation (override); that is optimizer.adam here (fused or "
        "apex)"
    ),
    "parallelism.fsdp_reshard_after_forward=never": (
        "unknown key parallelism.fsdp_reshard_after_forward (override); megalite has no FSDP; "
        "optimizer.zero=1 spreads the optimizer's state over parallel.dp"
    ),
    "quantize.linear.float8.recipe_name=rowwise": (
        "unknown key quantize.linear.float8.recipe_name (override); megalite has no FP8 yet; "
        "train.dtype=bfloat16"
    ),
    # the same written as options
    "--tensor-model-parallel-size=2": (
        "--tensor-model-parallel-size is no option; that is parallel.tp here; settings are written "
        "section.key=VALUE"
    ),
    "--bf16": (
        "--bf16 is no option; that is train.dtype here (bfloat16); settings are written "
        "section.key=VALUE"
    ),
    "--use-mcore-models": (
        "--use-mcore-models is no option; megalite has no choice of models; there is one "
        "implementation, which [model] describes; settings are written section.key=VALUE"
    ),
    "--use-rotary-position-embeddings": (
        "--use-rotary-position-embeddings is no option; that is model.positions here (rope); "
        "settings are written section.key=VALUE"
    ),
    "--no-position-embedding": (
        "--no-position-embedding is no option; that is model.positions here (rope, which has no "
        "learned rows); settings are written section.key=VALUE"
    ),
    "--optimizer adam": (
        "--optimizer is no option; that is optimizer.name here (adamw or muon); settings are "
        "written section.key=VALUE"
    ),
    "--distributed-backend nccl": (
        "--distributed-backend is no option; megalite has no setting for it; it is nccl on GPUs "
        "and gloo on CPUs; settings are written section.key=VALUE"
    ),
    "--attention-softmax-in-fp32": (
        "--attention-softmax-in-fp32 is no option; megalite has no switch for it; the softmax "
        "is always computed in float32; settings are written section.key=VALUE"
    ),
    "--recompute-method uniform": (
        "--recompute-method is no option; megalite has no choice of layers to recompute; "
        "train.recompute=full is each layer, stage each stage; settings are written "
        "section.key=VALUE"
    ),
    "--recompute-num-layers 1": (
        "--recompute-num-layers is no option; megalite has no choice of layers to recompute; "
        "train.recompute=full is each layer, stage each stage; settings are written "
        "section.key=VALUE"
    ),
    "--eod-mask-loss": "--eod-mask-loss is no option; write data.eod_mask_loss=true",
    "--reset-position-ids": (
        "--reset-position-ids is no option; that is data.reset_positions here (for learned "
        "positions; with model.positions=rope data.document_masks alone has its effect); settings "
        "are written section.key=VALUE"
    ),
    "--data-cache-path cache": (
        "--data-cache-path is no option; megalite has no cache of the order of samples; it is "
        "computed as it is read; settings are written section.key=VALUE"
    ),
    "--mock-data": (
        "--mock-data is no option; megalite has no mock data; `megalite data prepare builtin` "
        "makes a dataset of Python's standard library; settings are written section.key=VALUE"
    ),
    "--profile": (
        "--profile is no option; megalite has no profiler; pipeline.trace_step records a step; "
        "settings are written section.key=VALUE"
    ),
    "--log-throughput": (
        "--log-throughput is no option; megalite has no switch for it; every step's line has "
        "tok/s and mfu; settings are written section.key=VALUE"
    ),
    "--tensorboard-log-interval 1": (
        "--tensorboard-log-interval is no option; megalite has no interval of it; "
        "log.tensorboard=true writes every step; settings are written section.key=VALUE"
    ),
    "--manual-gc": (
        "--manual-gc is no option; megalite has no control of garbage collection; Python's own "
        "runs; settings are written section.key=VALUE"
    ),
    "--sequence-parallel": (
        "--sequence-parallel is no option; write parallel.sequence_parallel=true"
    ),
    "--sequence-parallel=false": (
        "--sequence-parallel is no option; write parallel.sequence_parallel=VALUE"
    ),
    "--lr=1e-3": "--lr is no option; write optimizer.lr=VALUE",
    "--train.steps=3": "--train.steps is no option; write train.steps=VALUE",
    "--micro-batch=2": "--micro-batch is no option; write train.micro_batch=VALUE",
    # misspelt, or in the wrong section
    "lr=1e-3": "unknown key lr (override); did you mean optimizer.lr?",
    "train.stpes=3": "unknown key train.stpes (override); did you mean train.steps?",
    "train.micro-batch=1": (
        "unknown key train.micro-batch (override); did you mean train.micro_batch?"
    ),
    "train.seq_length=16": "unknown key train.seq_length (override); did you mean data.seq_length?",
    # values in another form
    "train.steps=3.0": "train.steps=3.0 (override) needs an integer; write 3",
    "train.steps=1,000": 'train.steps="1,000" (override) needs an integer; write 1000',
    "train.tokens=10B": 'train.tokens="10B" (override) needs an integer; write 10e9',
    "train.tokens=1.5e0": "train.tokens=1.5 (override) needs an integer",
    "train.steps=none": 'train.steps="none" (override) needs an integer',
    'train.steps="3"': (
        'train.steps="3" (override) needs an integer; write it without quotes: 3'
    ),
    "train.deterministic=yes": (
        'train.deterministic="yes" (override) needs true or false; write true'
    ),
    "train.deterministic=0": "train.deterministic=0 (override) needs true or false; write false",
    "train.dtype=bf16": (
        "train.dtype=\"bf16\" (override) needs 'float32', 'bfloat16', 'float16' or 'float64'; did "
        "you mean bfloat16?"
    ),
    "optimizer.lr=3e-4x": 'optimizer.lr="3e-4x" (override) needs a number',
    "parallel.stage_layers=2": (
        "parallel.stage_layers=2 (override) needs a list, for example [1, 2]"
    ),
    "data.split=90/10": (
        "data.split=\"90/10\" (override) has '90/10', which is no number; use for example "
        '[0.98, 0.02], "98,2" or "969,30,1"'
    ),
    "data.path=corpus.bin": (
        'data.path="corpus.bin" (override) names the pair PREFIX.bin, PREFIX.idx; write \'corpus\''
    ),
    "out=~nobody-of-this-name/runs": (
        'out="~nobody-of-this-name/runs" (override) names no user\'s home; write the whole path'
    ),
    "train.steps": "override train.steps has no value; write section.key=VALUE",
    "model=llama": "override model names a section; write model.KEY=VALUE",
    # values that do not fit
    "train.steps=-1": "train.steps=-1 (override) needs to be at least 0",
    "train.global_batch=3 train.micro_batch=2": (
        "train.global_batch=3 is not divisible by train.micro_batch=2 x parallel.dp=1 = 2; "
        "use train.global_batch=2 or 4, or train.micro_batch=1"
    ),
    "parallel.tp=3": (
        "parallel.tp=3 does not divide model.num_heads=4; use parallel.tp=1, 2 or 4"
    ),
}  # fmt: skip

# settings and flags of other frameworks with values that switch off what is not here either
OFF = [
    "parallelism.context_parallel_degree=1",
    "parallelism.expert_parallel_degree=1",
    "parallel.cp=1",
    "model.num_experts=0",
    "model.num_experts=None",
    "fp8=false",
    "compile.enable=false",
    "training.compile=False",
    "profiling.enable_profiling=false",
    "float8.enable_fsdp_float8_all_gather=false",
    "model.converters=[]",
    "checkpoint.async_mode=disabled",
    "checkpoint.load_step=-1",
    "job.print_args=false",
    "parallelism.data_parallel_shard_degree=1",
    "torch_compile=False",
    "trainer.max_epochs=-1",
    "tokens.data_stages=[]",
    "--context-parallel-size 1",
    "--context-parallel-size=1",
    "--expert-model-parallel-size 1",
    "--fp8-format none",
    "--parallelism.context_parallel_degree 1",
    "--compile.enable=false",
    "--async-save=false",
    "--fsdp=",
    "quantize.linear.float8.enable=false",
    "fp16.enabled=false",
    "zero_optimization.offload_param.device=none",
    "metrics.enable_wandb=False",
    "fault_tolerance.enable=false",
    "checkpoint.initial_load_path=none",
    "--recompute-activations=false",
]

# a line of a file -> the start of the answer, after the file's name
LINES = {
    "bf16 = True": ", line 1: 'bf16 = True': Invalid value; write bf16 = true",
    "clip_grad = None": ", line 1: 'clip_grad = None': Invalid value; write clip_grad = \"none\"",
    "lr = .001": ", line 1: 'lr = .001': Invalid value; write lr = 0.001",
    "dtype = bfloat16": ", line 1: 'dtype = bfloat16': Invalid value; write dtype = \"bfloat16\"",
    "split = (0.9, 0.1)": (
        ", line 1: 'split = (0.9, 0.1)': Invalid value; write split = [0.9, 0.1]"
    ),
    "lr: 0.001": (
        ", line 1: 'lr: 0.001': Expected '=' after a key in a key/value pair; write lr = 0.001"
    ),
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(run_with_data(tmp_path))
    return path


@pytest.mark.parametrize(("given", "line"), MISTAKES.items())
def test_a_mistake_is_answered_by_what_to_write(run_file: Path, given: str, line: str) -> None:
    result = CliRunner().invoke(app, ["train", str(run_file), "--local", *given.split(" ")])
    assert result.exit_code == 2
    assert f"error: {line}" in result.stderr.splitlines()


@pytest.mark.parametrize("given", OFF)
def test_a_value_that_switches_off_what_is_not_here_is_to_be_removed(
    run_file: Path, given: str
) -> None:
    result = CliRunner().invoke(app, ["train", str(run_file), "--local", *given.split(" ")])
    name = given.replace("=", " ").split(" ")[0]
    what = f"{name} is no option" if name.startswith("--") else f"unknown key {name} (override)"
    assert result.stderr == f"error: {what}; remove it; it is off here as well\n"


def test_a_flag_is_not_off_by_what_follows_it(run_file: Path) -> None:
    flags = ["--manual-gc", "--mock-data", "false", "--profile", "train.steps=3", "--fsdp"]
    result = CliRunner().invoke(app, ["train", str(run_file), *flags])
    assert [line.split(";")[1] for line in result.stderr.splitlines()] == [
        " megalite has no control of garbage collection",
        " remove it",
        " megalite has no profiler",
        " megalite has no FSDP",
    ]


def test_every_value_of_the_table_that_is_off_is_so_in_files_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for row in foreign_words():
        for value in row.off:
            section, _, key = row.word.rpartition(".")
            table = f"[{section or 'elsewhere'}]\n{key} = {toml_value(value)}\n"
            path.write_text("[model]\n" + table if section != "model" else table)
            (line,) = [
                line
                for line in CliRunner().invoke(app, ["train", str(path)]).stderr.splitlines()
                if "unknown" in line
            ]
            assert line.endswith("; remove it; it is off here as well"), row


def test_a_section_of_another_framework_is_off_by_its_switches(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        run_with_data(tmp_path) + '[compile]\nenable = false\ncomponents = ["model"]\n'
        "[profiling]\nenable_profiling = false\nprofile_freq = 10\n"
        '[zero_optimization]\nstage = 1\noffload_optimizer = {device = "none", pin_memory = true}\n'
        '[quantize]\nrecipe = "rowwise"\n'
    )
    run = ["train", str(path)]
    off = "remove it; it is off here as well"
    assert CliRunner().invoke(app, run).stderr.splitlines() == [
        f"error: unknown section [compile] ({path}); {off}",
        f"error: unknown section [profiling] ({path}); {off}",
        f"error: unknown key zero_optimization.stage ({path}); that is optimizer.zero here "
        "(0 or 1)",
        f"error: unknown key zero_optimization.offload_optimizer ({path}); {off}",
        f"error: unknown key quantize.recipe ({path}); megalite has no FP8 yet; "
        "train.dtype=bfloat16",
    ]

    path.write_text(path.read_text().replace("profiling = false", "profiling = true"))
    assert [line.partition("; ")[2] for line in CliRunner().invoke(app, run).stderr.splitlines()][
        1:3
    ] == ["megalite has no profiler; pipeline.trace_step records a step"] * 2


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[quantize.linear.float8]\nenable = false\nfilter_fqns = ['out']", "section [quantize]"),
        (
            "[quantize]\nlinear = {float8 = {enable = false}, mx = {enable = false}}",
            "section [quantize]",
        ),
        ("[float8]\nenable_fsdp_float8_all_gather = false", "section [float8]"),
        ("[memory_estimation]\nenabled = false\ndisable_fake_mode = true", "section "
         "[memory_estimation]"),
        ("[flops_profiler]\nenabled = false\ntop_modules = 1", "section [flops_profiler]"),
        ("[experimental]\ncustom_import = ''", "section [experimental]"),
        ("[zero_optimization.offload_param]\ndevice = 'none'\npin_memory = true",
         "key zero_optimization.offload_param"),
    ],
)  # fmt: skip
def test_a_section_in_a_section_is_off_by_its_switch_too(
    tmp_path: Path, text: str, name: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_with_data(tmp_path) + text)
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.stderr == f"error: unknown {name} ({path}); remove it; it is off here as well\n"


def test_a_section_with_one_part_that_is_on_is_answered_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        run_with_data(tmp_path) + "[quantize.linear.float8]\nenable = false\n"
        "[quantize.grouped_mm.mx]\nrecipe_name = 'mxfp8'\n[lighteval]\nbatch_size = 8\n"
    )
    assert CliRunner().invoke(app, ["train", str(path)]).stderr.splitlines() == [
        f"error: unknown key quantize.linear ({path}); remove it; it is off here as well",
        f"error: unknown key quantize.grouped_mm ({path}); megalite has no FP8 yet; "
        "train.dtype=bfloat16",
        f"error: unknown key lighteval.batch_size ({path}); megalite has no evaluation by tasks; "
        "eval.sets are validation sets",
    ]


@pytest.mark.parametrize(("text", "answer"), LINES.items())
def test_a_line_that_is_no_toml_is_answered_by_what_to_write(
    tmp_path: Path, text: str, answer: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text + "\n")
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.stderr == f"error: {path}{answer}\n"


def test_a_config_that_is_no_toml_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "llama.yaml"
    path.write_text("model:\n  hidden_size: 32\n")
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.stderr == (
        f"error: {path}: a config is a TOML file; write [section] and key = value below it\n"
    )


def test_a_key_that_could_move_the_cursor_is_shown_escaped(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_with_data(tmp_path) + '["\\u001b[2J\\n"]\nkey = 1\n')
    result = CliRunner().invoke(app, ["train", str(path)])
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: unknown section [\\x1b[2J\\n] ({path}); ")


# A name of more bytes than a file can have is refused by the system, as is a path within a folder
# that the user may not enter (which the user of a test, root, always may).
@pytest.mark.parametrize(
    "words",
    [
        "train {config} data.path={long}",
        "train {config} data.tokenizer={long}",
        "train {config} out={long}",
        "report {long}",
        "info {long}",
        "generate {long} --prompt a",
        "data inspect {long}",
        "data merge --out merged {long} {long}",
        "data prepare {long} --out out --vocab-size 300",
    ],
)
def test_a_path_that_the_system_refuses_gets_one_line(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = words.format(config=run_file, long="x" * 300).split(" ")
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {'x' * 300}")
    assert result.stderr.endswith(
        ": File name too long; get the right to it, or give another path\n"
    )


def test_a_file_of_another_framework_is_answered_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(
        run_with_data(tmp_path) + "[training]\nlocal_batch_size = 8\nseq_len = 16\nsteps = 3\n"
        "[parallelism]\ntensor_parallel_degree = 2\n[metrics]\nlog_freq = 10\n"
        '[float8]\nrecipe_name = "rowwise"\n[optimiser]\nlr = 1\n'
    )
    found = CliRunner().invoke(app, ["train", str(path)]).stderr.splitlines()
    assert found == [
        f"error: unknown key training.local_batch_size ({path}); that is train.micro_batch here "
        "(with a pipeline that is pipeline_parallel_microbatch_size; train.global_batch is "
        "global_batch_size, or local_batch_size x parallel.dp where that is not set)",
        f"error: unknown key training.seq_len ({path}); that is data.seq_length here",
        f"error: unknown key training.steps ({path}); did you mean train.steps?",
        f"error: unknown key parallelism.tensor_parallel_degree ({path}); that is parallel.tp here",
        f"error: unknown key metrics.log_freq ({path}); that is log.interval here",
        f"error: unknown key float8.recipe_name ({path}); megalite has no FP8 yet; "
        "train.dtype=bfloat16",
        f"error: unknown section [optimiser] ({path}); did you mean [optimizer]?",
    ]


def test_a_table_where_a_list_of_tables_belongs_is_answered_by_its_form(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_with_data(tmp_path) + '[data.sources]\npath = "a"\n')
    found = CliRunner().invoke(app, ["train", str(path)]).stderr
    assert found == (
        f'error: data.sources={{path = "a"}} ({path}) needs a list, for example [1, 2]; write '
        "[[data.sources]] above each entry\n"
    )


def test_options_of_other_frameworks_are_answered_all_at_once(run_file: Path) -> None:
    flags = ["--num-layers", "2", "--micro-batch-size", "4", "--train-iters", "10", "--local"]
    result = CliRunner().invoke(app, ["train", str(run_file), *flags])
    assert [line.split(";")[0] for line in result.stderr.splitlines()] == [
        "error: --num-layers is no option",
        "error: --micro-batch-size is no option",
        "error: --train-iters is no option",
    ]


def test_an_unknown_option_beside_settings_is_named_with_those_there_are(run_file: Path) -> None:
    flags = ["--eval-interval=5", "--locl", "--no-save-optim"]
    result = CliRunner().invoke(app, ["train", str(run_file), *flags])
    assert result.stderr.splitlines() == [
        "error: --eval-interval is no option; write eval.interval=VALUE",
        "error: --locl is no option; did you mean --local? options are --local, --device, --name, "
        "--accept, --print-config, --help",
        "error: --no-save-optim is no option; megalite has no checkpoints without the optimizer's "
        "state; settings are written section.key=VALUE",
    ]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "train {run} --locl",
            "--locl is no option; did you mean --local? options are --local, --device, --name, "
            "--accept, --print-config, --help",
        ),
        (
            "plan {run} --gpu=8",
            "--gpu is no option; did you mean --gpus? options are --gpus, --hardware, --json, "
            "--help",
        ),
        ("report a --jsno", "--jsno is no option; did you mean --json? options are --out, --json, "
         "--help"),
        ("info -j a", "-j is no option; options are --quick, --json, --help"),
        ("data inspect --token 3 a", "--token is no option; did you mean --tokens? options are "
         "--tokenizer, --documents, --tokens, --rendered, --json, --help"),
        ("--verbose", "--verbose is no option; did you mean --version? options are --version, "
         "--install-completion, --show-completion, --help"),
        ("data --help-me", "--help-me is no option; did you mean --help? options are --help"),
    ],
)  # fmt: skip
def test_an_unknown_option_alone_is_answered_by_the_nearest_one(
    run_file: Path, words: str, answer: str
) -> None:
    result = CliRunner().invoke(app, words.format(run=run_file).split(" "))
    assert (result.exit_code, result.stderr) == (2, f"error: {answer}\n")


def test_a_value_that_looks_like_an_option_is_none(tmp_path: Path) -> None:
    words = ["generate", str(tmp_path), "--prompt", "--locl", "--top-p", "-5"]
    result = CliRunner().invoke(app, words)
    assert result.stderr.startswith("error: --top-p=-5 ")
    assert len(result.stderr.splitlines()) == 1


def test_mistakes_in_options_and_settings_are_reported_in_one_round(run_file: Path) -> None:
    words = f"train --num-layers 2 {run_file} --locl --accept train.stps,model.family --device tpu"
    words += " train.steps=x data.path=gone parallel.vpp=2"
    lines = CliRunner().invoke(app, words.split(" ")).stderr.splitlines()
    assert [line[:44] for line in lines] == [
        "error: --num-layers is no option; write mode",
        "error: --locl is no option; did you mean --l",
        "error: --accept train.stps: no such setting;",
        "error: --accept model.family: cannot change ",
        "error: --device=tpu: use auto or cpu or cuda",
        'error: train.steps="x" (override) needs an i',
        "error: parallel.vpp=2 has no effect with par",
        "error: data.path=gone: no file gone.bin nor ",
    ]

    words = f"plan {run_file} --hardwear h100 --hardware h99 train.steps=x --print-config"
    lines = CliRunner().invoke(app, words.split(" ")).stderr.splitlines()
    assert [line[:40] for line in lines] == [
        "error: --hardwear is no option; did you ",
        "error: --print-config is no option; opti",
        "error: hardware 'h99' is not known; use ",
        'error: train.steps="x" (override) needs ',
    ]

    words = f"schedule zb-v --config {run_file} --micro-batches 3"
    assert "did you mean --microbatches?" in CliRunner().invoke(app, words.split(" ")).stderr


def test_an_unknown_option_without_a_config_is_reported_alone() -> None:
    """The word behind it may be its value or the config: nothing is guessed about it."""
    result = CliRunner().invoke(app, ["train", "--num-layers", "2"])
    assert result.stderr == "error: --num-layers is no option; write model.num_layers=VALUE\n"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("report tiny", "tiny"),
        ("report elsewhere/tniy runs/tiny", "elsewhere/tniy"),
        ("report runs", "runs"),
        ("info tiny", "tiny"),
        ("info runs/tinny", "runs/tinny"),
        ("generate tiny --prompt a", "tiny"),
        ("schedule --from-run tiny", "tiny"),
    ],
)
def test_a_run_is_suggested_for_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, asked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/metrics.jsonl").touch()
    (tmp_path / "runs/other").mkdir()
    result = CliRunner().invoke(app, words.split(" "))
    assert result.exit_code == 2
    assert f"note: {asked}: did you mean runs/tiny?" in result.stderr.splitlines()


def test_a_run_is_suggested_for_weights_to_begin_from(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_file.parent)
    (run_file.parent / "runs/tiny").mkdir(parents=True)
    (run_file.parent / "runs/tiny/metrics.jsonl").touch()
    words = ["train", str(run_file), "checkpoint.load_weights=tiny"]
    assert "; did you mean runs/tiny? give a run's" in CliRunner().invoke(app, words).stderr


def test_a_setting_with_other_marks_between_section_and_key_is_that_setting() -> None:
    for key in filter(lambda key: "." in key, keys()):
        if find_foreign(key.replace(".", "_")) is None:
            assert nearest(key.replace(".", "_")) == [key]
            flag = "--" + key.replace(".", "-").replace("_", "-")
            value = "true" if keys()[key].kinds == {bool} else "VALUE"
            assert flag_problem(flag) == f"{flag} is no option; write {key}={value}"


def test_every_mistake_is_answered_without_torch(run_file: Path) -> None:
    code = f"""
import sys
from megalite.cli.main import app
for given in {list(MISTAKES)!r}:
    try:
        app(["train", {str(run_file)!r}, "--local", *given.split(" ")])
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 False\n" * len(MISTAKES), done.stderr
    assert len(MISTAKES) + len(LINES) >= 40


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.tokens=1e10", 10_000_000_000),
        ("train.tokens=1.5e3", 1500),
        ("train.steps=1_000", 1000),
        ("train.steps=2E1", 20),
        ("optimizer.lr=.001", 0.001),
        ("optimizer.lr=1.", 1.0),
        ("optimizer.lr=1e0", 1.0),
        ("train.deterministic=True", True),
        ("optimizer.clip_grad=None", None),
        ("optimizer.clip_grad=NULL", None),
        ("parallel.stage_layers=(3,5)", [3, 5]),
        ("parallel.stage_layers=3,5", [3, 5]),
        ("data.split=(0.9, 0.1)", (0.9, 0.1)),
        ("data.split=98,2", (98.0, 2.0)),
        ("log.wandb.tags=[a,b]", ["a", "b"]),
        ("log.wandb.tags=['a', \"b\"]", ["a", "b"]),
        ("data.path=1e3", "1e3"),
        ("name=1_0", "1_0"),
    ],
)
def test_a_value_that_can_only_mean_one_thing_is_taken(
    run_file: Path, override: str, value: object
) -> None:
    node = load_config(run_file, [override]).config
    for part in override.partition("=")[0].split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_whole_numbers_in_exponent_form_are_integers_in_files_too(run_file: Path) -> None:
    text = run_file.read_text()
    run_file.write_text(text.replace("steps = 3", "tokens = 1e10\nloss_spike_window = 1e2"))
    train = load_config(run_file).config.train
    assert (train.tokens, train.loss_spike_window) == (10**10, 100)
    run_file.write_text(text.replace("steps = 3", "tokens = 1e400"))
    result = CliRunner().invoke(app, ["train", str(run_file)])
    assert "error: train.tokens=inf" in result.stderr


def test_the_table_of_words_names_settings_that_exist() -> None:
    words = foreign_words()
    assert len({row.word for row in words}) >= 60
    for row in words:
        assert row.setting is None or row.setting in keys(), row
        assert row.setting is not None or row.note, row
        assert row.word not in keys(), row
        found = find_foreign(row.word)
        assert found is not None
        assert (found.setting is None) == (row.setting is None), row
        assert (row.setting or row.note) in str(flag_problem(f"--{row.word}=2")), row


def test_the_device_is_an_option_and_one_that_is_not_there_is_refused(run_file: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(run_file), "--device", "tpu"])
    assert result.stderr == "error: --device=tpu: use auto or cpu or cuda\n"
    assert result.exit_code == 2
