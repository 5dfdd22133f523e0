"""Corpora into datasets: what `megalite data prepare` reads, encodes and writes.

Reading order: documents, sources, corpus, tokenizer_training, encoding, indexed_writer, prepare.
"""
