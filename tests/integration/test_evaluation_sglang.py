"""The real SGLang, on a CPU, serves our export with DFLASH: equal outputs, and the acceptance we measure.

Both engines are asked the same questions and counted by one definition.
"""

from pathlib import Path

import pytest
import torch

from dflash import layout
from dflash.evaluation.questions import read_questions
from dflash.evaluation.report import Report
from dflash.evaluation.speculative import Decoder
from dflash.evaluation.stage import run_stage
from dflash.model.checkpoint import export_files
from dflash.model.facts import TargetFacts
from dflash.model.shape import resolve_shape
from dflash.model.target import load_tables, load_target
from dflash.model.tokenizer import load_tokenizer
from dflash.resource import Drafter
from dflash.resource.load import load_resource
from dflash.storage.commit import write_commit
from dflash.storage.store import Store
from tests.support import sglang_cpu
from tests.support.evaluation import DATASET, RUN, write_resource
from tests.support.overfit import trained
from tests.support.sglang_cpu.speculating import speculating_environment
from tests.support.tiny import save_tiny_target

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not sglang_cpu.available(), reason="needs `make serve-env` and a C compiler"),
]

MAX_TOKENS = 48


def commit_trained(store: Store, resource: Drafter) -> None:
    """Export a drafter that has learnt half of the questions' answers, so that some drafts are accepted."""
    spec = resource.spec
    target = load_target(spec.target.model, dtype="float32")
    tables = load_tables(spec.target.model, dtype="float32")
    tokenizer = load_tokenizer(spec.target.model)
    questions = read_questions(
        spec, Path.cwd(), store, tokenizer, target.facts.max_positions, samples=spec.evaluation.samples
    )
    decoder = Decoder(target, tables, None, frozenset())
    texts = []
    for question in questions[::2]:
        answer = decoder.answer(question, contender="none", max_tokens=MAX_TOKENS)
        texts.append((question.prompt_ids, answer.tokens))
    facts = TargetFacts.from_folder(spec.target.model)
    shape = resolve_shape(spec.drafter, facts)
    drafter = trained(target, tables, shape, texts, steps=200)
    write_commit(store, layout.export(RUN), export_files(drafter, shape, facts), {})


def evaluate(store: Store, resource: Drafter, evaluation: str, **changes: object) -> Report:
    changed = resource.spec.evaluation.model_copy(update=changes)
    spec = resource.spec.model_copy(update={"evaluation": changed})
    drafter = resource.model_copy(update={"spec": spec})
    return run_stage(store, drafter, dataset=DATASET, drafter=RUN, evaluation=evaluation)


def test_sglang_accepts_what_our_decoder_accepts_and_changes_no_token(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in speculating_environment(threads=torch.get_num_threads()).items():
        monkeypatch.setenv(name, value)
    target = save_tiny_target(tmp_path / "target", "llama", layers=5)
    settings = {
        "samples": 24,
        "maxTokens": MAX_TOKENS,
        "dtype": "bfloat16",
        "concurrency": [4],
        "serverArgs": [*sglang_cpu.SERVER_ARGS, "--context-length", "512"],
        "gate": {"minAcceptanceLength": 1.05},
    }
    resource = load_resource(write_resource(tmp_path, store, evaluation=settings, target=target))
    commit_trained(store, resource)

    ours = evaluate(store, resource, "1" * 16, engine="transformers", concurrency=[1])
    served = evaluate(store, resource, "2" * 16, engine="sglang")

    assert served.greedy_equal is True, served.differences
    assert served.gate.passed, served.gate
    assert served.engine["effective"]["dflash"]["speculative_algorithm"] == "DFLASH"
    assert served.engine["effective"]["dflash"]["speculative_num_draft_tokens"] == ours.block_size
    assert not [w for w in served.warnings if "counted" in w or "unstable" in w], served.warnings
    assert served.acceptance_length.tokens >= 1000
    a, b = ours.acceptance_length, served.acceptance_length
    assert a.pooled_interval is not None
    assert b.pooled_interval is not None
    joint = ((a.pooled_interval.high - a.pooled) ** 2 + (b.pooled_interval.high - b.pooled) ** 2) ** 0.5
    assert abs(a.pooled - b.pooled) <= joint, (a, b)

    refused = evaluate(
        store,
        resource,
        "3" * 16,
        engine="transformers",
        concurrency=[1],
        gate=resource.spec.evaluation.gate.model_copy(update={"min_acceptance_length": 3.9}),
    )
    assert not refused.gate.passed
