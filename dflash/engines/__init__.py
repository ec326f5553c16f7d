"""Engines that run the target to produce samples: token ids in, exact token ids out."""
