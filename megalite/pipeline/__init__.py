"""The pipeline runtime: executes a schedule on this rank's model chunks."""

from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.stage import Boundary, Stage

__all__ = ["Boundary", "PipelineRuntime", "Stage"]
