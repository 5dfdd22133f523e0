"""The pipeline runtime: executes a schedule on this rank's model chunks.

Reading order: runtime (set-up), interpreter (one pass through a program), channels (messages),
chunk (the members that a model chunk must have).
"""

from megalite.pipeline.chunk import BoundarySpec, PipelineChunk
from megalite.pipeline.runtime import PipelineRuntime

__all__ = ["BoundarySpec", "PipelineChunk", "PipelineRuntime"]
