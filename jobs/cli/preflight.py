"""What is checked before anything is started: model, tokenizer, shape and prompts, each told in a sentence.

Runs in a process of its own (`python -m jobs.cli.preflight --resource FILE`), so that the command that
waits for hours does not hold a tokenizer library in memory. Prints one JSON object, `Findings`.
Storage is not checked here: opening it is the check.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dflash.data.prompts import PromptSurvey, read_prompts, survey_prompts
from dflash.errors import ConfigurationError, DflashError, ExitCode, TemporaryError
from dflash.processes import dying_with_parent
from dflash.resource import Drafter, DrafterSpec
from dflash.storage.location import location_of
from dflash.storage.store import Store
from jobs.settings import JobSettings

DEADLINE_SECONDS = 1800.0
"""A model may have to be fetched from the hub."""


class Problem(BaseModel):
    """Something that would make the run fail."""

    sentence: str
    exit_code: int


class Findings(BaseModel):
    """What preflight found out."""

    problems: list[Problem] = []
    notes: list[str] = []

    def raise_problems(self) -> None:
        """One error for all problems; a configuration error outweighs a temporary one."""
        if not self.problems:
            return
        kinds = {p.exit_code for p in self.problems}
        told = [p.sentence for p in self.problems]
        text = told[0] if len(told) == 1 else f"{len(told)} problems:" + "".join(f"\n  {t}" for t in told)
        raise (TemporaryError if kinds == {int(ExitCode.TEMPORARY)} else ConfigurationError)(text)


_NOTHING_HELD_OUT = Problem(
    sentence="spec.prompts.holdOut keeps no prompt for evaluation; raise it, or give spec.evaluation.prompts",
    exit_code=int(ExitCode.CONFIGURATION),
)

_NO_LAYERS_TO_SPECULATE = Problem(
    sentence="spec.generation.speculation asks for NEXTN, but the target's config.json declares no "
    "multi-token prediction layers; remove it, or name an EAGLE algorithm and its draftModel",
    exit_code=int(ExitCode.CONFIGURATION),
)


def preflight(resource: Path, environment: Mapping[str, str]) -> Findings:
    """Check a resolved Drafter in a process of its own."""
    with subprocess.Popen(
        dying_with_parent([sys.executable, "-m", "jobs.cli.preflight", f"--resource={resource}"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "TRANSFORMERS_VERBOSITY": "error"},
    ) as process:
        try:
            out, err = process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TemporaryError(
                f"checking model and prompts took more than {DEADLINE_SECONDS:.0f} s; see whether the hub "
                "can be reached, then run again"
            ) from None
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        said = err.decode(errors="replace").strip()
        raise DflashError(f"checking model and prompts failed:\n{said}")
    return Findings.model_validate_json(out.splitlines()[-1])


def check(drafter: Drafter, store: Store | None) -> Findings:
    """All checks in this process; `store` is used for prompts at s3:// addresses."""
    findings = Findings()
    spec = drafter.spec
    survey = _try(findings, lambda: _survey(spec.prompts.uri, drafter, store))
    for prompts in spec.evaluation.prompts:
        _try(findings, lambda uri=prompts.uri: _survey(uri, drafter, store))  # type: ignore[misc]
    if survey is not None:
        findings.notes += _notes(survey)
        if survey.held_out == 0 and not spec.evaluation.prompts:
            findings.problems.append(_NOTHING_HELD_OUT)
    facts = _try(findings, lambda: _facts(drafter))
    tokenizer = _try(findings, lambda: _tokenizer(drafter)) if facts is not None else None
    if facts is None or tokenizer is None:
        return findings
    from dflash.model.shape import resolve_shape

    shape = _try(findings, lambda: resolve_shape(spec.drafter, facts, tokenizer))
    if shape is not None:
        _check_serving(findings, spec, facts, shape)
    context = min(spec.generation.context_length or facts.max_positions, facts.max_positions)
    if survey is not None:
        _try(findings, lambda: _check_lengths(drafter, store, tokenizer, context))
    return findings


def _try(findings: Findings, look: Callable[[], Any]) -> Any:
    try:
        return look()
    except DflashError as error:
        findings.problems.append(Problem(sentence=str(error), exit_code=int(error.exit_code)))
        return None


def _survey(uri: str, drafter: Drafter, store: Store | None) -> PromptSurvey:
    prompts = drafter.spec.prompts
    return survey_prompts(uri, Path.cwd(), store, hold_out=prompts.hold_out, limit=prompts.limit)


def _notes(survey: PromptSurvey) -> list[str]:
    counts = survey.counts
    notes = [f"{counts.unique} prompts, {survey.held_out} of them held out for evaluation"]
    if counts.duplicates:
        notes.append(f"{counts.duplicates} duplicate prompts are kept once")
    if survey.repeated_ids:
        notes.append(
            f"{survey.repeated_ids} rows repeat an id with other content; they are told apart by content"
        )
    return notes


def _facts(drafter: Drafter) -> Any:
    from dflash.model.facts import TargetFacts
    from dflash.model.source import model_folder, weight_files

    target = drafter.spec.target
    folder = model_folder(target.model, target.revision, weights=False)
    facts = TargetFacts.from_folder(folder)
    if Path(target.model).expanduser().is_dir():
        for file in weight_files(folder):
            if not os.access(file, os.R_OK):
                raise ConfigurationError(f"target.model: {file} cannot be read; change its permissions")
    return facts


def _tokenizer(drafter: Drafter) -> Any:
    from dflash.model.tokenizer import load_tokenizer

    return load_tokenizer(drafter.spec.target.model, drafter.spec.target.revision)


def _check_serving(findings: Findings, spec: DrafterSpec, facts: Any, shape: Any) -> None:
    """What SGLang could not serve hours later. With engine auto it may not be asked to: a note."""
    from dflash.evaluation import launch

    if spec.evaluation.engine == "sglang":
        _try(findings, lambda: launch.check_sglang_serves(shape, "spec.drafter"))
    elif spec.evaluation.engine == "auto":
        try:
            launch.check_sglang_serves(shape, "spec.drafter")
        except ConfigurationError as error:
            findings.notes.append(str(error))
    given = {server.contender for server in spec.evaluation.servers}
    if "mtp" in spec.evaluation.baselines and not facts.predicts_ahead and "mtp" not in given:
        findings.notes.append(launch.NO_MTP)
    speculation = spec.generation.speculation
    if speculation is not None and speculation.algorithm == "NEXTN" and not facts.predicts_ahead:
        findings.problems.append(_NO_LAYERS_TO_SPECULATE)


def _check_lengths(drafter: Drafter, store: Store | None, tokenizer: Any, context: int) -> None:
    """Refuse a prompt that leaves no room for an answer. Renders only what could be too long."""
    spec = drafter.spec
    room = 2 * spec.drafter.block_size  # an answer shorter than this is dropped anyway
    for prompt in read_prompts(spec.prompts.uri, Path.cwd(), store, limit=spec.prompts.limit):
        text = sum(len(str(m.get("content") or "").encode()) for m in prompt.messages)
        # A token covers at least one byte; templates and tools are small next to a context.
        if text < context // 2 and not prompt.tools:
            continue
        rendered = tokenizer.apply_chat_template(
            prompt.messages, tools=prompt.tools, add_generation_prompt=True, return_dict=False
        )
        if len(rendered) + room > context:
            raise ConfigurationError(
                f"{prompt.where}: {len(rendered)} tokens leave no room for an answer in the context of "
                f"{context}; shorten the prompt, or remove the row"
            )


@contextmanager
def _quiet_stdout() -> Iterator[int]:
    """Libraries may print; only the findings go to the real stdout."""
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        yield real
    finally:
        os.close(real)


def main() -> None:
    """Check, print the findings."""
    with _quiet_stdout() as out:
        drafter = JobSettings.read().load_resource()
        spec = drafter.spec
        addresses = [spec.prompts.uri, *(p.uri for p in spec.evaluation.prompts)]
        needs_store = any(a.startswith("s3://") for a in addresses)
        store = Store.open(location_of(drafter.spec.storage), patience=30.0) if needs_store else None
        os.write(out, check(drafter, store).model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main()
