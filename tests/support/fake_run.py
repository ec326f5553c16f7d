"""`dflash run FILE` with the jobs of `fake_job`: the real command line in a process of its own."""

import sys

import jobs.cli.run as run_module
from jobs.cli import main
from jobs.cli.preflight import Findings
from tests.support.fake_job import command

if __name__ == "__main__":
    real = run_module.run_file
    run_module.run_file = lambda file, **options: real(file, **options, command=command)
    run_module.preflight = lambda resource, environment: Findings()
    sys.argv[1:1] = ["run"]
    main()
