"""`python -m jobs.cli`: the same as `dflash`."""

from jobs.cli import main

main()
