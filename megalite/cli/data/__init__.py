"""`megalite data`: prepare, tokenizer, inspect, merge."""
