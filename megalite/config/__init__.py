"""A run's settings: the schema, how it is read from TOML, its meaning, how it is written.

Reading order: `schema` (every setting) with `families` and `shares`, `names` (dotted keys) with
`frameworks` (words of others), `load` with `explain` (from files and overrides to a config),
`inputs` and `effect` (settings that depend on each other), `meaning` and `resume` (comparison with
an earlier run), `text` (to TOML).
"""

from megalite.config.schema import (
    MAX_SEED,
    Activation,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    EvalSetConfig,
    GroupConfig,
    KernelsConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    RunConfig,
    Section,
    SourceConfig,
    TrainConfig,
    WandbConfig,
)

__all__ = [
    "MAX_SEED",
    "Activation",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "EvalSetConfig",
    "GroupConfig",
    "KernelsConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TrainConfig",
    "WandbConfig",
]
