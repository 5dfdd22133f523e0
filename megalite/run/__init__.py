"""A run in numbers: batches and rates by step, parameters and FLOPs, layers by stage, hardware.

Reading order: `batch_plan` and `lr_phases` (functions of the step), `parameters` (of a model, by
stage), `model_math` (their numbers, FLOPs, MFU) with `hardware` (peaks), `stages` and
`pipeline_schedule` (the pipeline), `rules` (optimizer).
"""
