"""Settings that do not fit each other: one line each, with the numbers and what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.checks import check_and_resolve, open_run
from megalite.checks.settings import (
    check_config,
    default_schedule,
    resolve,
    resolve_schedule,
)
from megalite.config import RunConfig
from megalite.config.effect import unreached
from megalite.config.inputs import missing_inputs
from megalite.config.load import LoadedConfig
from megalite.config.names import keys
from megalite.errors import ConfigError
from megalite.run.stages import stage_layer_counts
from megalite.schedules.catalogue import NAMES
from megalite.schedules.tune import default_name
from tests import ROOT

CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
RUNS = [p for p in CONFIGS if p.parent.name == "runs" or p.name == "quickstart.toml"]
MODELS = [p for p in CONFIGS if p.parent.name == "models"]

SIZES: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 8,
        "hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 131,
    },
    "data": {"seq_length": 32},
    "train": {"steps": 100, "global_batch": 16},
}


def config(**settings: Any) -> RunConfig:
    """A valid config with `section__key=value` changed."""
    tree = {section: dict(values) for section, values in SIZES.items()}
    for name, value in settings.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    return RunConfig.model_validate(tree)


def test_the_plain_config_is_valid() -> None:
    assert check_config(config()) == []
    assert check_config(config(parallel__tp=2, parallel__pp=2), 16) == []


@pytest.mark.parametrize(
    ("settings", "world_size", "line"),
    [
        # world size
        ({"parallel__tp": 2, "parallel__pp": 2}, 6,
         "world size 6 is not divisible by parallel.tp=2 x parallel.pp=2 = 4; "
         "start 4 or 8 processes"),
        ({"parallel__tp": 2, "parallel__pp": 2}, 2,
         "world size 2 is not divisible by parallel.tp=2 x parallel.pp=2 = 4; start 4 processes"),
        ({"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 4}, 8,
         "parallel.tp=2 x parallel.pp=2 x parallel.dp=4 = 16 is not the world size 8; "
         "set parallel.dp=2 or start 16 processes"),
        # pipeline
        ({"parallel__vpp": 2}, None,
         "parallel.vpp=2 has no effect with parallel.pp=1; set parallel.vpp=1 or parallel.pp >= 2"),
        ({"parallel__pp": 2, "pipeline__schedule": "interleaved"}, None,
         "pipeline.schedule=interleaved needs parallel.vpp >= 2, got parallel.vpp=1; "
         "set parallel.vpp=2 or pipeline.schedule=gpipe or 1f1b"),
        ({"parallel__pp": 2, "parallel__vpp": 2, "pipeline__schedule": "zb-w"}, None,
         "pipeline.schedule: schedule 'zb-w' is unknown (did you mean zb-v?); use one of "
         f"{', '.join(NAMES)}, a member such as \"family:f=1,lag=1\" or a file as "
         "\"file:my.csv\""),
        ({"parallel__pp": 2, "pipeline__schedule": "1F1B"}, None,
         "pipeline.schedule: schedule '1F1B' is unknown (did you mean 1f1b?); use one of "
         f"{', '.join(NAMES)}, a member such as \"family:f=1,lag=1\" or a file as "
         "\"file:my.csv\""),
        ({"parallel__pp": 2, "pipeline__schedule": "family:warm=1"}, None,
         "pipeline.schedule: 'family:warm=1' is no member of the family; write family:f=NUMBER"
         ",lag=NUMBER with group=COUNT and fused as you need them"),
        ({"parallel__pp": 2, "parallel__vpp": 3, "pipeline__schedule": "zb-v"}, None,
         "pipeline.schedule=zb-v needs parallel.vpp 2, got parallel.vpp=3; "
         "set parallel.vpp=2 or pipeline.schedule=gpipe or interleaved"),
        ({"parallel__pp": 2, "pipeline__max_activations": 3.0}, None,
         "pipeline.max_activations=3 has no effect with pipeline.schedule=its default; "
         "set pipeline.schedule=auto or take it out"),
        ({"train__recompute": "stage"}, None,
         "train.recompute=stage keeps only what enters a pipeline stage, and parallel.pp=1 has "
         "no microbatch under way that it could save; use train.recompute=full or selective"),
        ({"parallel__pp": 2, "parallel__vpp": 2, "pipeline__schedule": "1f1b"}, None,
         "pipeline.schedule=1f1b needs parallel.vpp 1, got parallel.vpp=2; "
         "set parallel.vpp=1 or pipeline.schedule=gpipe or interleaved"),
        ({"parallel__pp": 4, "parallel__vpp": 3}, None,
         "model.num_layers=8 is too few for parallel.pp=4 x parallel.vpp=3 = 12 stages, some of "
         "which would have no layer; use at most 8 stages (parallel.vpp=2 or fewer), at least "
         "12 layers, or parallel.stage_layers (where a stage may have 0)"),
        ({"parallel__pp": 2, "parallel__stage_layers": [3, 3, 2]}, None,
         "parallel.stage_layers has 3 entries, parallel.pp=2 x parallel.vpp=1 = 2 stages need 2; "
         "give one number for each stage"),
        ({"parallel__pp": 2, "parallel__stage_layers": [3, 4]}, None,
         "parallel.stage_layers=[3, 4] adds up to 7 layers, model.num_layers=8; add 1"),
        ({"parallel__pp": 2, "parallel__stage_layers": [6, 4]}, None,
         "parallel.stage_layers=[6, 4] adds up to 10 layers, model.num_layers=8; take away 2"),
        # tensor parallel
        ({"parallel__sequence_parallel": True}, None,
         "parallel.sequence_parallel=true has no effect with parallel.tp=1; "
         "set parallel.tp >= 2 or parallel.sequence_parallel=false"),
        ({"parallel__tp": 2, "parallel__sequence_parallel": True, "data__seq_length": 33}, None,
         "parallel.sequence_parallel: train.micro_batch=1 x data.seq_length=33 = 33 tokens, "
         "which parallel.tp=2 does not divide; use data.seq_length=32 or 34"),
        ({"parallel__tp": 8}, None,
         "parallel.tp=8 is more than model.num_kv_heads=4; use parallel.tp=1, 2 or 4, or "
         "model.num_kv_heads=8"),
        ({"parallel__tp": 2, "model__num_heads": 9, "model__num_kv_heads": None,
          "model__hidden_size": 90}, None,
         "parallel.tp=2 does not divide model.num_heads=9; use parallel.tp=1"),
        ({"parallel__tp": 4, "model__num_kv_heads": 6, "model__num_heads": 12,
          "model__hidden_size": 96}, None,
         "parallel.tp=4 does not divide model.num_kv_heads=6; use parallel.tp=1 or 2"),
        ({"parallel__tp": 4, "model__ffn_hidden_size": 130}, None,
         "parallel.tp=4 does not divide model.ffn_hidden_size=130; use parallel.tp=1 or 2"),
        ({"parallel__tp": 2, "model__vocab_pad_multiple": 1}, None,
         "parallel.tp=2 does not divide the padded vocabulary 131 (model.vocab_size=131 in "
         "multiples of model.vocab_pad_multiple=1); use model.vocab_pad_multiple=2"),
        # model
        ({"model__num_kv_heads": 3}, None,
         "model.num_kv_heads=3 does not divide model.num_heads=8; use 1, 2, 4 or 8"),
        ({"model__num_kv_heads": 16}, None,
         "model.num_kv_heads=16 does not divide model.num_heads=8; use 1, 2, 4 or 8"),
        ({"model__hidden_size": 68}, None,
         "model.num_heads=8 does not divide model.hidden_size=68; "
         "use model.hidden_size=64 or 80, or set model.head_dim"),
        ({"model__hidden_size": 72}, None,
         "model.hidden_size / model.num_heads=9 is odd, but rotary embedding turns pairs; "
         "use 8 or 10"),
        ({"model__head_dim": 1}, None,
         "model.head_dim=1 is odd, but rotary embedding turns pairs; use 2"),
        # batch
        ({"train__global_batch": 8, "train__micro_batch": 10**18}, None,
         "train.global_batch=8 is not divisible by train.micro_batch=1000000000000000000 x "
         "parallel.dp=1 = 1000000000000000000; use train.global_batch=1000000000000000000, or "
         "train.micro_batch=8"),
        ({"train__global_batch": 10, "train__micro_batch": 2, "parallel__dp": 2}, None,
         "train.global_batch=10 is not divisible by train.micro_batch=2 x parallel.dp=2 = 4; "
         "use train.global_batch=8 or 12, or train.micro_batch=1"),
        ({"train__global_batch": 3}, 4,
         "train.global_batch=3 is not divisible by train.micro_batch=1 x parallel.dp=4 = 4; "
         "use train.global_batch=4"),
        # optimizer
        ({"optimizer__lr": 1e-4, "optimizer__min_lr": 1e-3}, None,
         "optimizer.min_lr=0.001 is above optimizer.lr=0.0001; use at most 0.0001"),
        ({"optimizer__warmup_steps": 101}, None,
         "optimizer.warmup_steps=101 is more than train.steps=100; set "
         "optimizer.warmup_steps=100 or less"),
        ({"optimizer__warmup_steps": 20, "optimizer__decay_steps": 20}, None,
         "optimizer.decay_steps=20 (counted from step 0) leaves nothing to decay after "
         "optimizer.warmup_steps=20; set optimizer.decay_steps=21 or more"),
        # a rate of 0 before the end, by schedule and unit
        ({"optimizer__decay_steps": 90}, None,
         "optimizer.decay_steps=90 ends the decay at optimizer.min_lr=0: the learning rate is 0 "
         "from step 91 of 100 on; set optimizer.min_lr above 0, or remove optimizer.decay_steps, "
         "so that the decay ends with the run (a run that is resumed needs --accept for either)"),
        ({"optimizer__lr_schedule": "linear", "optimizer__decay_tokens": 5000}, None,
         "optimizer.decay_tokens=5000 ends the decay at optimizer.min_lr=0: the learning rate is 0 "
         "from step 11 of 100 on; set optimizer.min_lr above 0, or remove optimizer.decay_tokens, "
         "so that the decay ends with the run (a run that is resumed needs --accept for either)"),
        ({"optimizer__lr_schedule": "wsd", "optimizer__wsd_decay_steps": 5,
          "optimizer__decay_steps": 99}, None,
         "optimizer.decay_steps=99 ends the decay at optimizer.min_lr=0: the learning rate is 0 "
         "from step 100 of 100 on; set optimizer.min_lr above 0, or remove optimizer.decay_steps, "
         "so that the decay ends with the run (a run that is resumed needs --accept for either)"),
        ({"optimizer__warmup_steps": 2, "optimizer__warmup_tokens": 9}, None,
         "optimizer.warmup_steps=2 and optimizer.warmup_tokens=9 say the same thing twice; "
         "remove one"),
        ({"optimizer__warmup_steps": 20, "optimizer__decay_tokens": 10240}, None,
         "optimizer.decay_tokens=10240 (counted from the first token) leaves nothing to decay "
         "after optimizer.warmup_steps=20 (10240 tokens); set "
         "optimizer.decay_tokens=10241 or more"),
        ({"optimizer__warmup_tokens": 51201}, None,
         "optimizer.warmup_tokens=51201 is more than train.tokens=51200; set "
         "optimizer.warmup_tokens=51200 or less"),
        ({"optimizer__lr_schedule": "inverse_sqrt"}, None,
         "optimizer.lr_schedule=inverse_sqrt falls as sqrt(warm-up / position), but there is no "
         "warm-up; set optimizer.warmup_steps or optimizer.warmup_tokens"),
        ({"optimizer__lr_schedule": "wsd"}, None,
         "optimizer.lr_schedule=wsd needs the length of its last phase; set "
         "optimizer.wsd_decay_steps or optimizer.wsd_decay_tokens"),
        ({"optimizer__lr_schedule": "wsd", "optimizer__wsd_decay_steps": 3,
          "optimizer__decay_tokens": 9000}, None,
         "optimizer.decay_tokens=9000 ends a phase of optimizer.wsd_decay_steps=3; give both in "
         "tokens or both in steps"),
        ({"optimizer__lr_schedule": "wsd", "optimizer__wsd_decay_steps": 95,
          "optimizer__warmup_steps": 10}, None,
         "optimizer.lr_schedule=wsd: the last phase begins after 5 steps, within the warm-up of "
         "10; set optimizer.warmup_steps=5 or less, or shorten the last phase"),
        # lengths in tokens that are over within a step, of 16 x 32 tokens
        ({"optimizer__warmup_tokens": 511}, None,
         "optimizer.warmup_tokens=511 is less than the 512 tokens of the first step, so that none "
         "warms up; use at least 512, or remove it"),
        ({"optimizer__decay_tokens": 5}, None,
         "optimizer.decay_tokens=5 is less than the 512 tokens of the first step, so that none "
         "decays; use at least 512, or remove it"),
        ({"optimizer__lr_schedule": "wsd", "optimizer__wsd_decay_tokens": 511}, None,
         "optimizer.wsd_decay_tokens=511 is less than the 512 tokens of the last step, so that "
         "none decays; use at least 512, or remove it"),
        ({"train__batch_ramp_start": 8, "train__batch_ramp_increment": 4,
          "train__batch_ramp_samples": 7}, None,
         "train.batch_ramp_samples=7 is less than the 8 samples of the first step, after which "
         "the ramp would be over; use at least 8, or remove the ramp"),
        ({"train__batch_ramp_start": 8, "train__batch_ramp_increment": 4,
          "train__batch_ramp_tokens": 255}, None,
         "train.batch_ramp_tokens=255 is less than the 256 tokens of the first step, after which "
         "the ramp would be over; use at least 256, or remove the ramp"),
        # length and batch ramp
        ({"train__tokens": 5000}, None,
         "train.steps=100 and train.tokens=5000 (which is 10 steps) both say how long the run is; "
         "remove one"),
        ({"train__batch_ramp_start": 4, "train__batch_ramp_increment": 4}, None,
         "a batch ramp needs one of train.batch_ramp_samples and train.batch_ramp_tokens, neither "
         "is; set one of them"),
        ({"train__batch_ramp_start": 4, "train__batch_ramp_samples": 100}, None,
         "train.batch_ramp_increment is not set, but other settings of the ramp are; set it, or "
         "remove them"),
        ({"train__batch_ramp_start": 3, "train__batch_ramp_increment": 4,
          "train__batch_ramp_samples": 9}, None,
         "train.batch_ramp_increment=4 does not divide train.global_batch=16 - "
         "train.batch_ramp_start=3 = 13; use a divisor of it"),
        ({"train__batch_ramp_start": 16, "train__batch_ramp_increment": 4,
          "train__batch_ramp_tokens": 9}, None,
         "train.batch_ramp_start=16 is not below train.global_batch=16; use a smaller start, or "
         "remove the ramp"),
        ({"train__batch_ramp_start": 8, "train__batch_ramp_increment": 8, "parallel__pp": 2,
          "train__batch_ramp_samples": 99, "pipeline__schedule": "file:mine.csv"}, None,
         "pipeline.schedule=file:mine.csv is for one number of microbatches, but the batch ramp "
         "has several; use a named schedule, or remove the ramp"),
        ({"train__batch_ramp_start": 2, "train__batch_ramp_increment": 1,
          "train__batch_ramp_tokens": 900, "parallel__dp": 2}, None,
         "the batch ramp (train.batch_ramp_start=2, train.batch_ramp_increment=1) passes through "
         "a batch of 3 and 6 more, which is not divisible by train.micro_batch=1 x parallel.dp=2 "
         "= 2; use multiples of 2"),
        # validation
        ({"data__path": "a", "data__sources": [{"path": "b"}]}, None,
         "data.path=a and data.sources both say what to train on; keep one (a single source needs "
         "no weight)"),
        ({"data__sources": [{"path": "a/web"}, {"path": "b/web"}, {"path": "c"}],
          "data__split": (1.0, 0.0)}, None,
         "data.sources: 2 entries are called 'web', by which their losses would be told apart; "
         "give each a name of its own (name = ...)"),
        ({"eval__interval": 1, "eval__sets": [{"name": "validation", "path": "a"}]}, None,
         "eval.sets: 2 entries are called 'validation', by which their losses would be told "
         "apart; give each a name of its own (name = ...)"),
        ({"data__sources": [{"path": "a", "weight": 0}, {"path": "b", "weight": 0}]}, None,
         "data.sources: weight=0 in all 2 of them leaves nothing to train on; give at least one a "
         "positive weight"),
        ({"data__sources": [{"path": "a/web", "weight": 3}, {"path": "b", "weight": 1e-5}]}, None,
         "data.sources[1].weight=1e-05 (b) is 3.3e-06 of all weights, which is rounded to 0: "
         "shares are kept to 1/65536 of the whole; use weight=4.61e-05 or more, or 0 to leave the "
         "source out"),
        ({"eval__sets": [{"name": "a", "path": "b"}]}, None,
         'eval.sets=[{name = "a", path = "b"}] has no effect: eval.interval=0 never evaluates; '
         "remove it or set eval.interval"),
        ({"data__prepare": ["builtin"]}, None,
         'data.prepare=["builtin"] has no effect: it makes data.path, which is not set; remove it '
         "or set data.path"),
        ({"data__workers": 0, "data__prefetch": 4}, None,
         "data.prefetch=4 has no effect: data.workers=0 reads nothing ahead; remove it or set "
         "data.workers=1"),
        ({"eval__interval": 10, "data__split": (1.0, 0.0)}, None,
         "eval.interval=10 needs validation tokens, but data.split gives 0; "
         "use for example data.split=[0.98, 0.02], a set in eval.sets, or eval.interval=0"),
        # settings without effect
        ({"optimizer__lr_schedule": "constant", "optimizer__min_lr": 1e-5}, None,
         "optimizer.min_lr=1e-05 has no effect: optimizer.lr_schedule=constant never decays; "
         "remove it or use linear or cosine"),
        ({"optimizer__lr_schedule": "constant", "optimizer__decay_steps": 50}, None,
         "optimizer.decay_steps=50 has no effect: optimizer.lr_schedule=constant never decays and "
         "inverse_sqrt has no end; remove it or use linear, cosine or wsd"),
        ({"optimizer__wsd_decay_shape": "linear"}, None,
         "optimizer.wsd_decay_shape=linear has no effect: only optimizer.lr_schedule=wsd has a "
         "last phase; remove it or set optimizer.lr_schedule=wsd"),
        ({"train__loss_spike_window": 9}, None,
         "train.loss_spike_window=9 has no effect: train.loss_spike=off watches no loss; "
         "remove it or set train.loss_spike=stop or skip"),
        ({"optimizer__zero": 0, "optimizer__overlap_param_gather": False}, None,
         "optimizer.overlap_param_gather=false has no effect: optimizer.zero=0 gathers no "
         "parameters; remove it or set optimizer.zero=1"),
        ({"optimizer__max_skips": 3}, None,
         "optimizer.max_skips=3 has no effect: optimizer.non_finite=stop and "
         "train.loss_spike=stop (or off) skip no step; remove it or set one of them to skip"),
        ({"eval__batches": 3}, None,
         "eval.batches=3 has no effect: eval.interval=0 never evaluates; "
         "remove it or set eval.interval"),
        ({"parallel__overlap_tp": False}, None,
         "parallel.overlap_tp=false has no effect: parallel.tp=1 has no collective to overlap; "
         "remove it or set parallel.tp >= 2"),
        ({"parallel__head_layers": 1.5}, None,
         "parallel.head_layers=1.5 has no effect: layers are spread by cost only with "
         "parallel.pp >= 2 and without parallel.stage_layers; remove it"),
        ({"parallel__head_layers": 1.5, "parallel__pp": 2, "parallel__balance": "cost"}, None,
         "parallel.head_layers=1.5 has no effect: parallel.balance=cost counts FLOPs; remove it or "
         "set parallel.balance=layers"),
        ({"parallel__embedding_layers": 1.0, "parallel__pp": 2,
          "parallel__stage_layers": [4, 4]}, None,
         "parallel.embedding_layers=1 has no effect: layers are spread by cost only with "
         "parallel.pp >= 2 and without parallel.stage_layers; remove it"),
    ],
)  # fmt: skip
def test_one_mistake_one_line(settings: dict[str, Any], world_size: int | None, line: str) -> None:
    assert check_config(config(**settings), world_size) == [line]


def test_following_the_advice_gives_a_valid_config() -> None:
    assert check_config(config(parallel__tp=4)) == []
    assert check_config(config(parallel__tp=8, model__num_kv_heads=8)) == []
    assert check_config(config(train__global_batch=10, parallel__dp=2)) == []
    assert check_config(config(parallel__tp=2, model__vocab_pad_multiple=2)) == []
    assert check_config(config(parallel__pp=4, parallel__vpp=2)) == []
    assert check_config(config(train__global_batch=12, train__micro_batch=2, parallel__dp=2)) == []
    assert check_config(config(parallel__pp=2, parallel__vpp=2, pipeline__schedule="gpipe")) == []


def test_all_problems_are_reported_at_once() -> None:
    bad = config(
        parallel__tp=3,
        parallel__vpp=2,
        train__global_batch=10,
        train__micro_batch=3,
        eval__batches=1,
    )
    lines = check_config(bad, 8)
    assert [line.split(" ")[0] for line in lines] == [
        "world",  # 8 against tp 3
        "parallel.tp=3",  # kv heads
        "parallel.tp=3",  # feed-forward
        "parallel.tp=3",  # padded vocabulary
        "parallel.vpp=2",
        "train.global_batch=10",
        "eval.batches=1",
    ]
    with pytest.raises(ConfigError) as caught:
        check_and_resolve(bad, 8)
    assert caught.value.problems == lines


def test_a_default_written_out_is_refused_too_where_it_has_no_effect() -> None:
    plain = config(optimizer__zero=0)
    origins = dict.fromkeys(keys(), "default")
    assert check_config(plain, origins=origins) == []
    (line,) = check_config(plain, origins=origins | {"optimizer.overlap_param_gather": "run.toml"})
    assert line.startswith("optimizer.overlap_param_gather=true has no effect: optimizer.zero=0")


def test_lengths_in_tokens_of_a_step_are_taken() -> None:
    ramp = {"train__batch_ramp_start": 8, "train__batch_ramp_increment": 4}
    wsd = {"optimizer__lr_schedule": "wsd", "optimizer__wsd_decay_tokens": 512}
    assert check_config(config(optimizer__warmup_tokens=512)) == []
    assert check_config(config(optimizer__decay_tokens=512, optimizer__min_lr=1e-5)) == []
    assert check_config(config(**wsd)) == []
    # the first step of a ramp is a small one, the last one is not
    ramp |= {"train__batch_ramp_tokens": 256}
    assert check_config(config(**ramp, optimizer__warmup_tokens=256)) == []
    (line,) = check_config(config(**ramp, **(wsd | {"optimizer__wsd_decay_tokens": 256})))
    assert line.startswith("optimizer.wsd_decay_tokens=256 is less than the 512 tokens of the last")
    # the rate of inverse_sqrt is set by any warm-up
    inverse = config(optimizer__lr_schedule="inverse_sqrt", optimizer__warmup_tokens=9)
    assert check_config(inverse) == []


def test_the_best_checkpoint_goes_by_a_set_that_is_evaluated() -> None:
    evaluated = {"eval__interval": 5, "data__split": (0.9, 0.05, 0.05)}
    for name in ("validation", "books"):
        sets = [{"name": "books", "path": "data/books"}]
        fitting = config(**evaluated, eval__sets=sets, checkpoint__keep_best=name)
        assert check_config(fitting) == []
    for name in ("test", "validation/web"):  # the test set is evaluated once, at the end
        (line,) = check_config(config(**evaluated, checkpoint__keep_best=name))
        assert line == (
            f"checkpoint.keep_best={name} is not evaluated during the run; use validation"
        )
    (line,) = check_config(config(checkpoint__keep_best="validation"))
    assert line.startswith("checkpoint.keep_best=validation has no effect: eval.interval=0 never")


def test_what_a_short_run_does_not_reach_is_told_not_refused() -> None:
    intervals = {
        "eval__interval": 50,
        "checkpoint__interval": 7,
        "log__interval": 50,
        "log__param_stats_interval": 6,
        "train__loss_spike": "stop",
    }
    short = config(**intervals, train__steps=6)
    assert check_config(short) == []
    assert unreached(short, 6) == [
        "eval.interval=50 is more than the run's 6 steps: evaluated at the end only",
        "checkpoint.interval=7 is more than the run's 6 steps: no save by steps",
        "log.interval=50 is more than the run's 6 steps: only the last step has a line here",
        "train.loss_spike_window=64 is not full before the last of the run's 6 steps: no loss is "
        "judged",
    ]
    assert unreached(config(log__param_stats_interval=2), 1) == [
        "log.param_stats_interval=2 is more than the run's 1 step: nothing is measured"
    ]
    assert unreached(config(optimizer__lr=0.0), 9) == ["optimizer.lr=0: no step changes a weight"]
    assert unreached(short, 65) == unreached(config(), 1) == unreached(short, 0) == []


def test_warmup_is_not_checked_when_nothing_is_trained() -> None:
    assert check_config(config(train__steps=0, optimizer__warmup_steps=10)) == []


def test_a_spoilt_world_size_does_not_spoil_the_batch_check() -> None:
    lines = check_config(config(parallel__tp=2, train__global_batch=1), 7)
    assert len(lines) == 1
    assert lines[0].startswith("world size 7")


@pytest.mark.parametrize(
    ("pp", "vpp", "schedule"), [(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "interleaved")]
)
def test_resolve_fills_in_dp_and_schedule(pp: int, vpp: int, schedule: str) -> None:
    open_config = config(parallel__tp=2, parallel__pp=pp, parallel__vpp=vpp)
    full = resolve(open_config, 8)
    assert (full.parallel.dp, full.pipeline.schedule) == (8 // (2 * pp), schedule)
    assert resolve(open_config).parallel.dp == 1
    assert resolve(full, 8) == full
    assert resolve_schedule(open_config).parallel.dp is None


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (4, 1), (4, 4), (8, 2)])
def test_the_default_schedule_is_the_best_by_simulation(pp: int, vpp: int) -> None:
    assert default_schedule(1, 1, 1) == default_schedule(1, 1, 4) == "1f1b"
    for micro_batches in (2 * pp, 4 * pp + 1):
        assert default_schedule(pp, vpp, 1) == default_name(pp, vpp, micro_batches)


@pytest.mark.parametrize("recompute", ["full", "stage"])
def test_recomputed_layers_are_not_kept_for_weight_gradients(recompute: str) -> None:
    assert default_schedule(4, 1, 1, recompute) == "1f1b"
    assert default_schedule(4, 2, 1, recompute) == "interleaved"
    assert default_schedule(4, 1, 1, "selective") == "zb-h1"
    open_config = config(parallel__pp=2, train__recompute=recompute)
    assert resolve(open_config).pipeline.schedule == "1f1b"


def test_resolve_keeps_what_was_chosen() -> None:
    chosen = config(parallel__pp=2, parallel__dp=2, pipeline__schedule="gpipe")
    assert resolve(chosen, 4) == chosen


def test_resolve_refuses_a_world_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="world size 6 is not divisible"):
        resolve(config(parallel__tp=4), 6)


def test_filled_in_values_are_marked_as_derived() -> None:
    loaded = LoadedConfig(config(parallel__pp=2), dict.fromkeys(keys(), "default"))
    origins = loaded.with_config(resolve(loaded.config, 4)).origins
    derived = {name for name, origin in origins.items() if origin == "derived"}
    assert derived == {"parallel.dp", "pipeline.schedule"}


def test_missing_inputs_names_each_file(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    (tmp_path / "corpus.bin").touch()
    lines = missing_inputs(
        config(data__path=str(prefix), data__tokenizer=str(tmp_path / "t.model"))
    )
    assert len(lines) == 2
    assert lines[0].startswith(f"data.path={prefix}: no file {prefix}.idx below ")
    assert lines[1].startswith(f"data.tokenizer={tmp_path}/t.model: no such file or folder;")
    sets = [{"name": "code", "path": "gone"}]
    lines = missing_inputs(config(data__sources=[{"path": "a"}, {"path": str(prefix)}],
                                  eval__sets=sets))  # fmt: skip
    assert [line.split(" below ")[0] for line in lines] == [
        "data.sources[0].path=a: no file a.bin nor a.idx",
        f"data.sources[1].path={prefix}: no file {prefix}.idx",
        "eval.sets[0].path=gone: no file gone.bin nor gone.idx",
    ]
    (tmp_path / "corpus.idx").touch()
    assert missing_inputs(config(data__path=str(prefix))) == []
    assert missing_inputs(config()) == []


WORLD_SIZES = {"quickstart.toml": 8, "llama-8b-64gpu.toml": 64}


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.name)
def test_every_run_config_is_valid(path: Path) -> None:
    config = open_run(path, world_size=WORLD_SIZES[path.name]).config
    assert sum(stage_layer_counts(config)) == config.model.num_layers


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.name)
def test_every_model_config_serves_as_a_base(path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        f'base = "{path}"\n[data]\nseq_length = 32\n[train]\nsteps = 1\nglobal_batch = 1\n'
    )
    assert open_run(run).config.train.steps == 1


def test_every_file_under_configs_is_covered() -> None:
    hardware = {p for p in CONFIGS if p.parent.name == "hardware"}
    assert {*RUNS, *MODELS, *hardware} == set(CONFIGS)
    assert len(RUNS) >= 2
    assert len(MODELS) >= 4
