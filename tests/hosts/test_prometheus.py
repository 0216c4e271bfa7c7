"""A real Prometheus scrapes cluster-top, and every query of the Grafana dashboard answers."""

import json
import re
import signal
import socket
import subprocess
import urllib.parse
import urllib.request

import pytest
from test_top_terminal import ENV, TOP

from conftest import ROOT
from ops_rig import wait_for
from ranks_rig import free_port


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


@pytest.fixture
def started(tmp_path):
    children = []

    def start(*argv, **more):
        children.append(
            subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **more)
        )
        return children[-1]

    yield start
    for child in children:
        child.terminate()
        child.wait(60)
        child.stderr.close()


def test_prometheus_scrapes_it_and_the_dashboard_has_answers(started, tmp_path):
    ours, theirs = free_port(), free_port()
    top = started(*TOP, "--replay", "demo", "--speed", "2", "--metrics", str(ours), env=ENV)
    wait_for(lambda: top.poll() is not None or "llama405b_step{" in reach(ours), 60)
    text = reach(ours)
    assert re.search(r'^llama405b_gpu_power_watts\{gpu="3",host="gpu-3",rank="19"\} \d', text, re.MULTILINE)
    assert "# HELP llama405b_step Last step" in text
    with pytest.raises(OSError, match="refused"):  # from outside: only this machine is answered
        socket.create_connection((other_address(), ours), 2)
    (tmp_path / "p.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f'  - {{job_name: llama405b, static_configs: [{{targets: ["127.0.0.1:{ours}"]}}]}}\n'
    )
    started(
        "prometheus",
        "--config.file=p.yml",
        f"--web.listen-address=127.0.0.1:{theirs}",
        f"--storage.tsdb.path={tmp_path}/db",
    )

    def ask(query):
        url = f"http://127.0.0.1:{theirs}/api/v1/query?query={urllib.parse.quote(query)}"
        try:
            answer = json.loads(get(url))
        except OSError:
            return []
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    steps = wait_for(lambda: ask('llama405b_step{run="llama-405b"}'), 60)
    assert int(steps[0]["value"][1]) >= 1180
    assert wait_for(lambda: ask("sum(llama405b_gpu_power_watts) > 1000"), 30)
    assert len(ask("llama405b_host_up == 1")) == 8
    assert wait_for(lambda: ask("llama405b_tokens_per_second"), 60)  # it trains
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    quiet = {
        "Loss": "evaluation",
        "GPUs that stand out": "",
        "Hosts that are not heard": "",
    }  # nothing of these at the moment
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found = ask(target["expr"].replace("$run", "llama-405b"))
            assert found or quiet.get(panel["title"]) in ("", target["legendFormat"]), target
    top.send_signal(signal.SIGTERM)
    assert top.wait(60) == 143
    assert reach(ours) == ""


def reach(port):
    try:
        return get(f"http://127.0.0.1:{port}/metrics")
    except OSError:
        return ""


def other_address():
    """An address of this machine that is not loopback; loopback's second if it has no network."""
    shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return next((address for address in shown if "." in address), "127.0.0.2")


def test_a_port_that_is_taken_is_refused_in_a_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = [*TOP, "--replay", "demo", "--metrics", str(port)]
        done = subprocess.run(argv, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        f"--metrics: 127.0.0.1:{port} cannot be listened on (Address already in use); use another port" in done.stderr
    )


@pytest.mark.parametrize("flag", ["--once", "--json"])
def test_what_ends_at_once_answers_nobody(tmp_path, flag):
    for more in (["--metrics", "9405"], ["--on-change", "true"]):
        argv = [*TOP, "--replay", "demo", flag, *more]
        done = subprocess.run(argv, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "remove --once or --json, or add --watch" in done.stderr) == (2, True)
