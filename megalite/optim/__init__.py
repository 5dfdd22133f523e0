"""The distributed optimizer: flat buckets, ZeRO-1, AdamW and Muon, clipping, loss scaling."""
