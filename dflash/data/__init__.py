"""Prompts, samples and datasets: what is asked, what was answered, and how both lie in the store."""
