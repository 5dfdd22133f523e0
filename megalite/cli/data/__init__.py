"""`megalite data`: prepare, inspect, merge, train-tokenizer."""
