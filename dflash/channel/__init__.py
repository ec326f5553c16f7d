"""The hidden-state channel: targets serve hidden states, drafters pull them, either side may die.

Read in this order: `interface` (what is exchanged), `scheduler` (who is asked for what: pure), `wire`
and `verify` (one flat buffer per send, checked on receipt), `link` (the two-rank process group of one
pair), `messages` (the control connection), `keys` and `members` (who may join), `server`, `client`,
`verdict`. Knows nothing of models, data sets, losses or Kubernetes.
"""
