"""`dflash run` from end to end with jobs that only keep the books: real processes, a real S3 server."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from dflash.resource.load import load_resource
from dflash.storage.embedded import EmbeddedStore
from operators.observe import outputs_of


class Place:
    """A folder with a Drafter file, and ways to run it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "drafter.yaml"
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "fakes").mkdir()
        (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(6)))
        self.declare()

    def declare(self, samples: int = 8, **more) -> None:
        spec = {
            "target": {"model": "org/model", "revision": "abc"},
            "prompts": {"uri": "prompts.jsonl", "holdOut": 0.1},
            "evaluation": {"samples": samples},
            "storage": {"uri": "state"},
            **more,
        }
        document = {
            "apiVersion": "dflash.dev/v1alpha1",
            "kind": "Drafter",
            "metadata": {"name": "fake"},
            "spec": spec,
        }
        self.file.write_text(json.dumps(document))

    def start(self, **environment: str) -> subprocess.Popen[str]:
        with (self.folder / "stderr").open("a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fake_run", "--plain", str(self.file)],
                env={**os.environ, "FAKE_FOLDER": str(self.folder / "fakes"), **environment},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.processes.append(process)
        return process

    def run(self, **environment: str) -> tuple[int, str]:
        process = self.start(**environment)
        out, _ = process.communicate(timeout=250)
        return process.returncode, out

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def starts(self) -> list[tuple[str, int, int, int]]:
        path = self.folder / "fakes" / "starts"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(role, int(i), int(a), int(pid)) for role, i, a, pid in (line.split() for line in lines)]

    def wait_for(self, role: str, *, after: int = 0, seconds: float = 60.0) -> int:
        """The process number of a job of this role that has just been started."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for started, _, _, pid in self.starts()[after:]:
                if started == role:
                    return pid
            time.sleep(0.05)
        raise AssertionError(f"no {role} within {seconds} s: {self.stderr}")

    def committed(self) -> dict[str, bytes]:
        """Every object that is an output."""
        with EmbeddedStore(self.folder / "state") as server:
            store = server.store()
            kept = ("manifest.json", "export/", "report.json", "parts/", "inputs.json")
            keys = [i.key for i in store.list() if any(part in i.key for part in kept)]
            return {key: store.get(key) for key in keys if not key.endswith("COMMIT.json")}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.processes:  # what a failed test left; children die with it
        process.kill()
        process.communicate()


def nothing_is_left(place: Place) -> bool:
    """No job and no server of this run lives."""
    numbers = {pid for *_, pid in place.starts()}
    mine = str(place.folder)
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        if process.info["pid"] in numbers or any(mine in part for part in process.info["cmdline"] or ()):
            return False
    return True


def until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_run_makes_everything_once_then_is_up_to_date_then_remakes_only_what_changed(place):
    groups = {"generation": {"replicas": 2}, "training": {"targets": 2, "drafters": 2}}
    place.declare(**groups)
    code, out = place.run(FAKE_PAUSE="0.5")  # the drafters work long enough for every target to start
    assert code == 0, place.stderr
    report = Path(out.strip().splitlines()[-1])
    assert report.name == "report.json"
    assert orjson.loads(report.read_bytes())["acceptance_length"]["pooled"] == 1.5
    assert (report.parent / "report.html").exists()
    assert (place.folder / "state" / "drafters" / "fake" / "config.json").exists()
    first = place.starts()
    assert sorted({(role, index) for role, index, *_ in first}) == [
        ("drafter", 0),
        ("drafter", 1),
        ("evaluate", 0),
        ("generate", 0),
        ("generate", 1),
        ("target", 0),
        ("target", 1),
    ]
    assert len(first) == 7
    assert nothing_is_left(place)

    code, out = place.run()
    assert (code, out.splitlines()[0]) == (0, "up to date")
    assert out.strip().splitlines()[-1] == str(report)
    assert place.starts() == first

    place.declare(samples=9, **groups)
    code, out = place.run()
    assert code == 0
    assert "up to date" not in out
    assert [role for role, *_ in place.starts()[7:]] == ["evaluate"]

    place.declare(samples=9, training={"learningRate": 2e-3})
    assert place.run()[0] == 0
    assert sorted(role for role, *_ in place.starts()[8:]) == ["drafter", "evaluate", "target"]

    before = place.starts()
    place.declare(samples=9, **groups)  # back again: everything is there
    assert place.run()[0] == 0
    assert place.starts() == before


def test_inputs_are_written_down_beside_each_output(place):
    assert place.run()[0] == 0
    drafter = load_resource(place.file)
    outputs = outputs_of(drafter)
    kept = place.committed()
    assert orjson.loads(kept[f"drafters/{outputs.hashes.drafter}/inputs.json"]) == orjson.loads(
        orjson.dumps(outputs.inputs[1])
    )


@pytest.mark.parametrize("role", ["generate", "target", "drafter"])
def test_a_killed_child_is_replaced_and_the_run_ends_with_the_same_outputs(place, role):
    process = place.start(FAKE_STEPS="20", FAKE_PAUSE="0.1")
    os.kill(place.wait_for(role), signal.SIGKILL)
    process.communicate(timeout=250)
    assert process.returncode == 0, place.stderr
    assert "Killed" in place.stderr
    attempts = {attempt for started, _, attempt, _ in place.starts() if started == "drafter"}
    assert attempts == ({0, 1} if role == "drafter" else {0})


def test_a_killed_command_leaves_nothing_running_and_goes_on_from_what_was_committed(place, tmp_path_factory):
    whole = Place(tmp_path_factory.mktemp("whole"))
    assert whole.run()[0] == 0
    chance = random.Random(7)
    for role in ("generate", "drafter", "drafter"):
        begun = len(place.starts())
        process = place.start(FAKE_PAUSE="0.2")
        place.wait_for(role, after=begun)
        time.sleep(chance.uniform(0.5, 1.5))
        process.kill()
        process.communicate(timeout=10)
        assert until(lambda: nothing_is_left(place)), "processes outlived the command"
    code, _ = place.run()
    assert code == 0, place.stderr
    assert place.committed() == whole.committed()
    ranks = [(index, attempt) for role, index, attempt, _ in place.starts() if role == "drafter"]
    assert len(ranks) == len(set(ranks)), "an attempt number was used twice"


def test_a_killed_s3_server_is_started_again_under_the_running_jobs(place):
    process = place.start(FAKE_PAUSE="0.3", FAKE_STEPS="12")
    place.wait_for("drafter")
    time.sleep(0.5)
    servers = [
        p
        for p in psutil.process_iter(["cmdline"])
        if any("weed" in part for part in p.info["cmdline"] or ())
        and str(place.folder) in " ".join(p.info["cmdline"])
    ]
    assert servers
    servers[0].kill()
    process.communicate(timeout=250)
    assert process.returncode == 0, place.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("role", ["generate", "drafter"])
def test_a_signal_ends_all_children_within_ten_seconds_and_a_new_run_finishes(place, number, code, role):
    process = place.start(FAKE_PAUSE="1", FAKE_STEPS="20")
    place.wait_for(role)
    time.sleep(0.7)
    asked = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert time.monotonic() - asked < 10.0
    assert process.returncode == code
    assert nothing_is_left(place)
    assert "run again to go on" in place.stderr
    if (number, role) == (signal.SIGINT, "drafter"):
        assert place.run()[0] == 0


def test_a_child_that_ignores_sigterm_is_killed_in_time(place):
    (place.folder / "fakes" / "deaf-target").touch()
    process = place.start(FAKE_PAUSE="1", FAKE_STEPS="20")
    place.wait_for("drafter")
    time.sleep(1.0)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert 5.0 < time.monotonic() - asked < 10.0
    assert nothing_is_left(place)


def test_a_configuration_error_of_a_job_ends_the_run_with_its_sentence(place):
    (place.folder / "fakes" / "fail-generate").write_text("78 the gate refuses the dataset: 87 % too short")
    code, _ = place.run()
    assert code == 78
    assert "the gate refuses the dataset: 87 % too short" in place.stderr
    assert [role for role, *_ in place.starts()].count("generate") <= 2
    assert nothing_is_left(place)


def test_a_failure_is_retried_and_told(place):
    (place.folder / "fakes" / "fail-evaluate").write_text("1 ZeroDivisionError: division by zero")
    assert place.run()[0] == 0
    assert "evaluate 0: Failed: ZeroDivisionError: division by zero" in place.stderr
    assert [role for role, *_ in place.starts()].count("evaluate") == 2


def test_a_run_that_keeps_failing_ends_when_its_budget_is_spent(place):
    place.declare(training={"maxRestarts": 0})
    (place.folder / "fakes" / "fail-generate").write_text("75 the hub did not answer")
    code, _ = place.run()
    assert code == 75
    assert "the hub did not answer" in place.stderr


def test_a_second_run_of_the_same_drafter_is_refused_while_the_first_works(place):
    process = place.start(FAKE_PAUSE="1", FAKE_STEPS="20")
    place.wait_for("generate")
    code, _ = place.run()
    assert code == 75
    assert "is being run by process" in place.stderr
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def test_another_drafter_of_the_same_name_is_refused_and_may_take_over(place):
    place.declare(suspend=True)
    assert place.run()[0] == 0
    other = place.folder / "other.yaml"
    other.write_text(place.file.read_text())
    place.file = other
    code, _ = place.run()
    assert code == 78
    assert "already belongs to another Drafter named 'fake'" in place.stderr
    assert "--take-over" in place.stderr


def test_a_suspended_drafter_starts_nothing(place):
    place.declare(suspend=True)
    code, out = place.run()
    assert (code, place.starts()) == (0, [])
    assert "suspended" in out


def test_status_is_told_during_a_run_and_after_it(place):
    command = [sys.executable, "-m", "jobs.cli", "status", "--json", str(place.file)]
    process = place.start(FAKE_PAUSE="0.5", FAKE_STEPS="40")
    place.wait_for("drafter")
    time.sleep(2.0)
    during = orjson.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    states = {stage["name"]: stage["state"] for stage in during["stages"]}
    assert states == {"generation": "done", "training": "running", "evaluation": "waiting"}
    assert during["stages"][1]["progress"]["total"] == 40
    watched = subprocess.run(
        [*command[:3], "watch", "--once", str(place.file)], capture_output=True, check=True
    )
    assert b"fake: training" in watched.stdout
    process.communicate(timeout=250)
    after = orjson.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (after["phase"], after["promoted"]) == ("ready", True)
    assert after["report"]["acceptance_length"]["pooled"] == 1.5
    assert 0 < during["cost"]["spent_gpu_hours"] < after["cost"]["spent_gpu_hours"]
    assert after["cost"]["wasted_gpu_hours"] == 0


def test_what_failures_wasted_is_told_in_money(place):
    place.declare(tracking={"gpuHourPrice": 3600.0})  # a second costs one
    process = place.start(FAKE_STEPS="20", FAKE_PAUSE="0.2", CUDA_VISIBLE_DEVICES="")
    time.sleep(1.5)
    os.kill(place.wait_for("drafter"), signal.SIGKILL)
    process.communicate(timeout=250)
    assert process.returncode == 0, place.stderr
    command = [sys.executable, "-m", "jobs.cli", "status", "--json", str(place.file)]
    cost = orjson.loads(subprocess.run(command, capture_output=True, check=True).stdout)["cost"]
    assert cost["spent"] == pytest.approx(3600 * cost["spent_gpu_hours"])
    assert 0 < cost["wasted"] < cost["spent"] < 120
