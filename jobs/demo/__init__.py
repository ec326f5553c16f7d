"""The demo: a small real model, prompts and a Drafter, to see the whole chain on any machine."""
