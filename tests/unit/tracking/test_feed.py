"""What a tracker is sent, in which order, and what is said if it takes nothing. The packages themselves: tests/ranks."""

import os
import shutil

import pytest

from llama405b.commands import track
from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import append_line, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import EvaluationMetrics, EventKind, PromptSample, RunEvent
from llama405b.settings.command import parse
from llama405b.settings.config import to_toml
from llama405b.tracking import feed, uploads


class Fake:
    """A tracker that remembers; ``opened``: how many there were."""

    opened = 0

    def __init__(self, *given):
        type(self).opened += 1
        self.told, self.names, self.given = [], set(), given

    def log(self, entries):
        for entry in entries:
            [first, *_] = entry.values
            kind = "event" if first.startswith("events/") else "sample" if first.startswith("prompts/") else "metrics"
            self.names |= {*entry.values}
            self.told.append((entry.step, kind))

    def send_model(self, path):
        if path.name == "refused":
            raise UserError("it takes none")
        if path.name == "broken":
            raise OSError("no\nroute")

    def end(self):
        pass


@pytest.fixture
def found(tmp_path, monkeypatch):
    monkeypatch.setitem(feed.TRACKERS, "wandb", Fake)
    monkeypatch.setattr(Fake, "opened", 0)
    run = RunDir(tmp_path)
    run.config.write_text(to_toml(parse(["--preset", "demo", "--tracking.to", "wandb"]).config))
    for step in (0, 4, 8):
        append_line(run.metrics, reader.dumps(EvaluationMetrics(step, 1.0, 2.0, 1)))
        append_line(run.samples, reader.dumps(PromptSample(step, 1.0, "a", "b")))
    append_line(run.events("rank-0"), reader.dumps(RunEvent(1.0, "rank-0", EventKind.SAVED, 1, 4)))
    return feed.TrackerFeed("wandb", run, print)


def test_all_is_sent_by_step_and_of_each_the_numbers_first(found):
    found.send()
    kinds = {0: ["metrics", "sample"], 4: ["metrics", "event", "sample"], 8: ["metrics", "sample"]}
    assert found.tracker.told == [(step, kind) for step, of in kinds.items() for kind in of]


def test_all_is_sent_again_to_a_tracker_that_lost_it(found, monkeypatch):
    said = []
    monkeypatch.setattr(Fake, "end", lambda self: said.append(self.told))
    found.run.tracking.mkdir(exist_ok=True)
    codes = [track.send_metrics(found.run, "wandb", None, resend=again) for again in (False, False, True)]
    assert codes == [0, 0, 0]
    first, again = said  # at the second time there was nothing to send
    assert len(first) == 7
    assert again == first


def add(run, step):
    append_line(run.metrics, reader.dumps(EvaluationMetrics(step, 1.0, 2.0, 1)))
    append_line(run.samples, reader.dumps(PromptSample(step, 1.0, "a", "b")))
    append_line(run.events("rank-0"), reader.dumps(RunEvent(1.0, "rank-0", EventKind.SAVED, 1, step)))


@pytest.mark.parametrize("kind", ["metrics", "event", "sample"])
def test_the_next_attempt_sends_nothing_again(found, kind):
    found.send()
    for step in (12, 16, 20):
        again = feed.TrackerFeed("wandb", found.run, print)
        again.send()
        assert again.tracker is None
        add(found.run, step)
        again.send()
        assert [step for step, of in again.tracker.told if of == kind] == [step]
        assert again.sent_state.id == found.sent_state.id


def test_what_was_not_taken_is_sent_at_the_end_however_soon(found, monkeypatch, capsys):
    monkeypatch.setattr(Fake, "log", lambda *_: 1 / 0)
    found.send()
    found.send()
    assert Fake.opened == 1  # it waits before it tries again
    monkeypatch.undo()
    monkeypatch.setitem(feed.TRACKERS, "wandb", Fake)
    add(found.run, 12)
    found.end()
    assert [step for step, kind in found.tracker.told if kind == "metrics"] == [0, 4, 8, 12]
    assert capsys.readouterr().out == "tracking wandb: division by zero; keeping the metrics to send them later\n"


def test_half_a_line_is_sent_when_it_is_whole(found):
    line = reader.dumps(EvaluationMetrics(12, 1.0, 2.0, 1)) + "\n"
    found.send()
    for part in (line[:9], line[9:]):
        with found.run.metrics.open("a") as file:
            file.write(part)
        found.send()
    assert found.tracker.told[-1] == (12, "metrics")


def test_a_model_goes_to_the_run_that_is_open(found, tmp_path, capsys):
    found.send()
    found.send_model(tmp_path / "out")
    assert Fake.opened == 1
    assert capsys.readouterr().out == f"tracking wandb: sent {tmp_path}/out as an artifact\n"


def test_a_model_that_is_not_taken_is_one_sentence(found, tmp_path):
    with pytest.raises(UserError, match="it takes none"):
        found.send_model(tmp_path / "refused")
    with pytest.raises(
        RunError, match=r"tracking wandb: \S+/broken could not be sent \(no route\); run the same command again"
    ):
        found.send_model(tmp_path / "broken")


def test_prompts_that_begin_alike_have_curves_of_their_own_and_no_command_is_sent(found):
    prompts = [f"{'### Instruction: ' * 4}{number}" for number in (1, 2)]
    words = [
        "--preset",
        "demo",
        "--tracking.to",
        "wandb",
        *(word for prompt in prompts for word in ("--evaluation.prompts", prompt)),
        "--evaluation.fraction",
        "0.1",
    ]
    asked = parse([*words, "--evaluation.every", "1", "--checkpoint.after_save", "curl -H s3cr3t"])
    found.run.config.write_text(to_toml(asked.config))
    for prompt in prompts:
        append_line(found.run.samples, reader.dumps(PromptSample(9, 1.0, prompt, "b")))
    again = feed.TrackerFeed("wandb", found.run, print)
    again.send()
    assert {"prompts/1", "prompts/2"} <= again.tracker.names
    _, identity = again.tracker.given
    assert "s3cr3t" not in repr(identity.settings)


def test_a_copied_run_is_another_one_and_a_renamed_one_the_same(found, tmp_path, capsys):
    found.send()
    copied, renamed = tmp_path / "copied", tmp_path / "renamed"
    shutil.copytree(tmp_path, copied, ignore=shutil.ignore_patterns("copied"))
    feeds = [feed.TrackerFeed("wandb", RunDir(copied), print) for _ in range(2)]
    assert feeds[0].sent_state == feed.SentState()
    feeds[0].send()
    assert len(feeds[0].tracker.told) == 7  # the whole of it
    assert feeds[0].sent_state.id != found.sent_state.id
    assert f"copied is a copy of {tmp_path.resolve()}; sending it as a new run" in capsys.readouterr().out
    elsewhere = tmp_path / "elsewhere"
    copied.rename(elsewhere)
    copied.symlink_to(elsewhere)  # moved to a larger disk, with a link where it was
    assert feed.TrackerFeed("wandb", RunDir(copied), print).sent_state == feeds[0].sent_state
    copied.unlink()
    elsewhere.rename(renamed)
    assert feed.TrackerFeed("wandb", RunDir(renamed), print).sent_state == feeds[0].sent_state


@pytest.mark.parametrize(
    ("resume_step", "words"), [(None, []), (9, []), (10, []), (8, ["it keeps steps 9-9 as they are"])]
)
def test_steps_that_a_tracker_keeps_are_named_where_a_resume_takes_them_again(
    tmp_path, monkeypatch, resume_step, words
):
    monkeypatch.setattr(os, "spawnve", lambda *_: 0)
    run, said = RunDir(tmp_path / "r"), []
    write_json(run.sent("wandb"), feed.SentState(step=9, directory=str(run.path.resolve())))
    trackers = uploads.TrackerProcesses(["wandb"], run, said.append, resume_step)
    os.close(trackers.write_fd)
    assert [line.partition(": ")[2].partition(" and ")[0] for line in said] == words
