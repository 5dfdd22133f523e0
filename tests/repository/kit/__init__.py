"""What the tests of the repository share.

`settings` makes docs/settings.md; `commands` has what the pages show to be run, and how it is.
"""
