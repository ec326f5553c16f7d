"""Measures a drafter: how many tokens it saves, at what speed, and that not one token changes."""
