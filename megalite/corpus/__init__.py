"""From corpora to datasets: the reading, encoding and writing of `megalite data prepare`.

Reading order: documents (bytes checked as text), sources and parquet (files), corpus;
tokenizer_training; encoding and encode_pool (text to ids); publish, unfinished,
prepare_tokenizer and prepare (the whole run); then indexed_writer and merge.
"""
