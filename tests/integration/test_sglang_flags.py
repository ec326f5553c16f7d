"""Every flag that we give SGLang is one that it knows: its own parser reads them, nothing is started."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dflash.engines.server import launch_command
from dflash.evaluation import launch
from dflash.resource.generation import Generation, Speculation
from dflash.resource.target import Target
from jobs.demo import sglang_cpu
from tests.support.tiny import draft_shape

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sglang_cpu.available(), reason="needs `make serve-env` and a C compiler"),
]

_PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
for flags in json.load(sys.stdin):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args(flags))
    print(json.dumps({key: parsed[key] for key in parsed if key.startswith(("speculative", "mamba_radix"))}))
"""


def test_every_flag_is_one_that_the_engine_knows() -> None:
    target = Target(model="/models/some", revision="a" * 40)
    speculation = Speculation(steps=3, draft_tokens=4, draft_model="/draft")
    generation = Generation(
        speculation=speculation, server_args=["--enable-metrics", *sglang_cpu.SERVER_ARGS]
    )
    serving = launch_command(target, generation, 8192, 1234)[3:]
    drafting, hybrid = (
        launch.sglang_drafter_flags("/draft", draft_shape(block_size=16), hybrid=hybrid)
        for hybrid in (False, True)
    )
    model = ["--model-path", "/models/some"]
    lists = [serving, [*model, *drafting], [*model, *hybrid], [*model, *launch.sglang_mtp_flags()]]
    parsing = subprocess.run(
        [str(sglang_cpu.PYTHON), "-c", _PARSE],
        input=json.dumps(lists),
        env={**os.environ, **sglang_cpu.environment()},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert parsing.returncode == 0, parsing.stderr[-2000:]
    parsed = [json.loads(line) for line in parsing.stdout.splitlines() if line.startswith("{")]
    assert parsed[0]["speculative_algorithm"] == "NEXTN"
    assert [p["speculative_num_draft_tokens"] for p in parsed] == [4, 16, 16, launch.MTP_DRAFT_TOKENS]
    assert [p["mamba_radix_cache_strategy"] for p in parsed] == ["auto", "auto", "extra_buffer", "auto"]
