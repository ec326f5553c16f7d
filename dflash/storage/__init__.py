"""Objects in S3: where they are, how they are read, written and committed, and a server for one machine.
"machine.

Knows nothing of datasets, drafters or evaluations: key names are in `dflash.layout`.
"""
