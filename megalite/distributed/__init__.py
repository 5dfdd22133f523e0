"""Communication between ranks: mesh, collectives, their bytes and waits, agreement of ranks.

Reading order: `mesh` (axes and process groups), `comm` (collectives over an axis), `ledger` with
`clock` (bytes and waits), `agree` and `equality` (errors, and configs before training), then
`precision` (number formats) and `reduced_precision` (sums that are sent in 16 bits).
"""
