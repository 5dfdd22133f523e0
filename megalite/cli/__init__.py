"""The command line: one module per verb, with thin functions.

Reading order: `main` (the verbs), then the module of a verb. `formatting`, `progress` and
`interrupt` serve several of them.
"""
