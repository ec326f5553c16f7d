"""The real SGLang, on a CPU, serves our export with DFLASH: equal outputs, and the acceptance we measure.

Both engines are asked the same questions and counted by one definition: the first token of an answer comes
from the prefill and belongs to no verification.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dflash import layout
from dflash.engines.http import HttpClient
from dflash.engines.server import ServerProcess
from dflash.evaluation.equality import NEAR_TIE_STEPS, Scores, compare
from dflash.evaluation.launch import sglang_drafter_flags
from dflash.evaluation.questions import read_questions
from dflash.evaluation.report import Report
from dflash.evaluation.speculative import Decoder
from dflash.evaluation.stage import run_stage
from dflash.model.checkpoint import export_files
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape, resolve_shape
from dflash.model.tokenizer import load_tokenizer
from dflash.resource import Drafter
from dflash.resource.generation import Generation
from dflash.resource.load import load_resource
from dflash.resource.target import Target
from dflash.storage.commit import write_commit
from dflash.storage.store import Store
from jobs.demo import sglang_cpu
from jobs.demo.sglang_cpu import speculating_environment
from tests.support.agreement import within_joint_interval, within_sampling_error
from tests.support.evaluation import DATASET, RUN, write_resource
from tests.support.overfit import loaded, trained
from tests.support.tiny import save_tiny_target

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not sglang_cpu.available(), reason="needs `make serve-env` and a C compiler"),
]

MUTATED = "b" * 16
MAX_TOKENS = 48
WRONG_THETA = 1e7


@pytest.fixture(autouse=True)
def _serving_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in speculating_environment(threads=torch.get_num_threads()).items():
        monkeypatch.setenv(name, value)


class Scene(NamedTuple):
    """What is served: a resource, and a drafter that has learnt most of the answers to its questions."""

    resource: Drafter
    drafter: DFlashDrafter
    shape: DraftShape

    def commit(self, store: Store, run: str, shape: DraftShape) -> None:
        """The drafter's weights, exported under this declaration."""
        facts = TargetFacts.from_folder(self.resource.spec.target.model)
        declared = DFlashDrafter(shape)
        declared.load_state_dict(self.drafter.state_dict())
        write_commit(store, layout.export(run), export_files(declared, shape, facts), {})

    def evaluate(self, store: Store, run: str, evaluation: str, **changes: object) -> Report:
        """A whole evaluation stage."""
        changed = self.resource.spec.evaluation.model_copy(update=changes)
        spec = self.resource.spec.model_copy(update={"evaluation": changed})
        resource = self.resource.model_copy(update={"spec": spec})
        return run_stage(store, resource, dataset=DATASET, drafter=run, evaluation=evaluation)


def prepare(folder: Path, store: Store, *, samples: int) -> Scene:
    target_folder = save_tiny_target(folder / "target", "llama", layers=5)
    settings = {
        "samples": samples,
        "maxTokens": MAX_TOKENS,
        "dtype": "bfloat16",
        "concurrency": [4],
        "serverArgs": [*sglang_cpu.SERVER_ARGS, "--context-length", "512"],
        "gate": {"minAcceptanceLength": 2.95},
    }
    path = write_resource(folder, store, evaluation=settings, target=target_folder, prompts=4 * samples)
    resource = load_resource(path)
    spec = resource.spec
    target, tables = loaded(target_folder)
    questions = read_questions(
        spec, folder, store, load_tokenizer(str(target_folder)), target.facts.max_positions, samples=samples
    )
    assert len(questions) == samples
    decoder = Decoder(target, tables, None, frozenset())
    texts = []
    for number, question in enumerate(questions):
        if number % 4 == 0:
            continue  # on these it is often wrong
        answer = decoder.answer(question, contender="none", max_tokens=MAX_TOKENS)
        texts.append((question.prompt_ids, answer.tokens))
    shape = resolve_shape(spec.drafter, target.facts)
    return Scene(resource, trained(target, tables, shape, texts, steps=200), shape)


def check_agreement(store: Store, scene: Scene, *, tokens: int) -> Report:
    """A sound export is promoted by the real engine with our own decoder's figures; gives the latter's."""
    scene.commit(store, RUN, scene.shape)
    ours = scene.evaluate(store, RUN, "1" * 16, engine="transformers", concurrency=[1])
    served = scene.evaluate(store, RUN, "2" * 16, engine="sglang")
    assert served.greedy_equal is True, served.differences
    assert served.gate.passed, served.gate
    assert store.get_json(layout.promoted("tiny"))["evaluation"] == "2" * 16
    assert served.engine["effective"]["dflash"]["speculative_algorithm"] == "DFLASH"
    assert served.engine["effective"]["dflash"]["speculative_num_draft_tokens"] == ours.block_size
    assert not [w for w in served.warnings if "counted" in w or "unstable" in w], served.warnings
    assert served.acceptance_length.tokens >= tokens
    assert within_joint_interval(ours.acceptance_length, served.acceptance_length)
    assert within_sampling_error(ours.histogram, served.histogram), (ours.histogram, served.histogram)
    return ours


def test_sglang_accepts_what_our_decoder_accepts_and_changes_no_token_and_a_mutated_export_is_found_out(
    tmp_path: Path, store: Store
) -> None:
    scene = prepare(tmp_path, store, samples=24)
    ours = check_agreement(store, scene, tokens=1000)

    scene.commit(store, MUTATED, replace(scene.shape, rope_theta=WRONG_THETA))
    mutated = scene.evaluate(store, MUTATED, "3" * 16, engine="sglang")
    assert mutated.greedy_equal is True, "a bad drafter is slow, never wrong"
    assert not within_joint_interval(ours.acceptance_length, mutated.acceptance_length)
    assert not within_sampling_error(ours.histogram, mutated.histogram)
    assert not mutated.gate.passed
    assert "rope_theta is wrong: it was trained with 50000, not 1e+07" in mutated.gate.advice
    assert store.get_json(layout.promoted("tiny"))["evaluation"] == "2" * 16


@pytest.mark.soak
def test_they_agree_over_five_thousand_tokens(tmp_path: Path, store: Store) -> None:
    check_agreement(store, prepare(tmp_path, store, samples=112), tokens=5000)


def test_a_prefix_that_is_cached_is_drafted_for_as_well_as_a_new_one(tmp_path: Path, store: Store) -> None:
    scene = prepare(tmp_path, store, samples=6)
    folder = tmp_path / "export"
    folder.mkdir()
    facts = TargetFacts.from_folder(scene.resource.spec.target.model)
    for name, content in export_files(scene.drafter, scene.shape, facts).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    target = Target(model=scene.resource.spec.target.model, dtype="bfloat16")
    tokenizer = load_tokenizer(target.model)
    questions = [
        question.prompt_ids
        for question in read_questions(scene.resource.spec, tmp_path, store, tokenizer, 512, samples=6)
    ]
    flags = [*sglang_cpu.SERVER_ARGS, *sglang_drafter_flags(str(folder), scene.shape, hybrid=False)]
    server = ServerProcess(target, Generation(server_args=flags), 512)

    async def ask(client: HttpClient, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": MAX_TOKENS}
        body = {"input_ids": prompt, "sampling_params": sampling}
        status, answer = await client.post("/generate", body, 600.0)
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    async def twice() -> list[list[dict[str, Any]]]:
        try:
            await server.start()
            client = HttpClient(server.url)
            # Each a second time: its whole prompt is cached; and each shares its first words with the others.
            return [[await ask(client, prompt) for prompt in questions] for _ in range(2)]
        finally:
            server.kill()

    first, again = asyncio.run(twice())
    plain = Decoder(*loaded(Path(target.model)), None, frozenset())

    def scores(text: list[int], a: int, b: int) -> Scores:
        logits = plain.logits(text)
        return Scores(float(logits[a]), float(logits[b]), float(logits.max()))

    for number, (prompt, new, cached) in enumerate(zip(questions, first, again, strict=True)):
        assert cached["meta_info"]["cached_tokens"] >= len(prompt) - 1
        difference = compare(
            sample_id=str(number),
            contender="cached",
            prompt=prompt,
            plain=new["output_ids"],
            other=cached["output_ids"],
            dtype="bfloat16",
            scores=scores,
        )
        assert difference is None or difference.kind == "near_tie", (difference, NEAR_TIE_STEPS)
    verifications = [sum(a["meta_info"]["spec_verify_ct"] for a in answers) for answers in (first, again)]
    assert verifications[1] <= 1.1 * verifications[0], verifications
    assert verifications[0] < 0.6 * sum(len(a["output_ids"]) for a in first), "drafts must be accepted at all"
