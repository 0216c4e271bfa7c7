"""`bench` on hosts: two nodes on this machine, each test launched like a run."""

import json
import platform


def test_one_rank_is_tested_then_all(work, cli):
    done = cli(
        work,
        "bench",
        "hosts",
        "--tests",
        "start,collectives",
        "--out",
        "found",
        "--bundle",
        "b.json",
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.partition("--- paste")[0].splitlines()
    alone = ["start"]
    together = ["start", "collectives"]
    assert [line.split()[0] for line in lines] == ["one", *alone, "all", *together]
    assert all("passed, " in line for line in lines if line.startswith(" "))
    found = [json.loads(path.read_text()) for path in sorted((work / "found").glob("*.json"))]
    assert sorted((each["hosts"], each["ranks"], each["probe"]) for each in found) == sorted(
        [(1, 1, name) for name in alone] + [(2, 2, name) for name in together]
    )
    [links] = [each for each in found if each["probe"] == "collectives"]
    assert {"all-reduce", "reduce-scatter"} <= {figure["name"] for figure in links["figures"]}
    assert "2 hosts, 2 x cpu" in done.stdout
    bundle = (work / "b.json").read_text()
    assert len(json.loads(bundle)["results"]) == len(alone + together)
    assert not any(name in bundle for name in ("node-a", "node-b", platform.node(), "127.0.0.1", "localhost"))


def test_what_is_wrong_starts_nothing(work, cli):
    for args, words in (
        (["hosts", "--tests", "strat"], "'strat' is not a test (did you mean 'start'?)"),
        (["nosuch"], "nosuch: cannot be read"),
        (["--env", "A=1"], "and --setup-line are for hosts"),
    ):
        done = cli(work, "bench", *args)
        assert done.returncode == 2, done.stdout
        assert words in done.stderr
    assert not (work / "runs").exists()
