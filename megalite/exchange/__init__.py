"""Models of other frameworks' formats, in and out. Reading order: `keys`, `tensors`, `classes`.

`keys` turns entries of a config.json into settings of [model] and back, `tensors` says where a
tensor of theirs lies in one of ours, `classes` is the table of what is known. `folder` opens a
folder as a checkpoint, `write` makes one. Nothing of a folder is ever executed.
"""
