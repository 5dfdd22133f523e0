"""A run's settings: the schema, how it is read from TOML, its meaning, how it is written.

Reading order: `schema` (every setting) with `families` and `shares`, `names` (dotted keys) with
`frameworks` (words of others), `load` with `shipped` (configs by name) and `explain` (from files
and overrides to a config),
`inputs` and `effect` (settings that depend on each other), `meaning` and `resume` (comparison with
an earlier run), `text` (to TOML).
"""

from megalite.config.schema import (
    MAX_SEED as MAX_SEED,
)
from megalite.config.schema import (
    Activation as Activation,
)
from megalite.config.schema import (
    CheckpointConfig as CheckpointConfig,
)
from megalite.config.schema import (
    DataConfig as DataConfig,
)
from megalite.config.schema import (
    EvalConfig as EvalConfig,
)
from megalite.config.schema import (
    EvalSetConfig as EvalSetConfig,
)
from megalite.config.schema import (
    GroupConfig as GroupConfig,
)
from megalite.config.schema import (
    KernelsConfig as KernelsConfig,
)
from megalite.config.schema import (
    LogConfig as LogConfig,
)
from megalite.config.schema import (
    ModelConfig as ModelConfig,
)
from megalite.config.schema import (
    OptimizerConfig as OptimizerConfig,
)
from megalite.config.schema import (
    ParallelConfig as ParallelConfig,
)
from megalite.config.schema import (
    PipelineConfig as PipelineConfig,
)
from megalite.config.schema import (
    Rotation as Rotation,
)
from megalite.config.schema import (
    RunConfig as RunConfig,
)
from megalite.config.schema import (
    Section as Section,
)
from megalite.config.schema import (
    SourceConfig as SourceConfig,
)
from megalite.config.schema import (
    TrainConfig as TrainConfig,
)
from megalite.config.schema import (
    WandbConfig as WandbConfig,
)
