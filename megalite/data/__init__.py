"""Corpora, tokenizer, indexed datasets, and the order in which their samples are trained on.

Reading order: documents, corpus, tokenizer, indexed, prepare (text to files); then sampler, dataset
(files to microbatches). Only dataset imports torch; importing this package imports none of them.
"""
