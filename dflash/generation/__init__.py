"""The dataset stage: prompts go through an engine and a quality gate into committed parts."""
