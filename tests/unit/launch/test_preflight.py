import dataclasses
import json
import shutil

import pytest
from fakes import FakeFleet

from llama405b.contract.checkpoints import INDEX, FileDigest, Manifest, RunIdentity, write_manifest
from llama405b.contract.errors import UserError
from llama405b.predict.calibration import Calibration, MeasuredStep, StandaloneRates
from llama405b.predict.search import Fit
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.schema import Adapter
from llama405b.spec.models import parse_llama
from llama405b.spec.plan import Node, Plan
from llama405b.spec.rules import update_settings
from llama405b_tools.agent import launch_facts, machine
from llama405b_tools.agent.launch_facts import HeadRoute, InputCheck, LaunchFacts
from llama405b_tools.agent.machine import DirectoryCheck, DirectoryFault
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.launch import preflight, slurm
from llama405b_tools.launch.preflight import Rendezvous
from llama405b_tools.launch.probes import rehearsal_request
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.start import disk_room_faults, loading_note, predict_launch, refuse_misfit
from llama405b_tools.parsers import Address, Rdma
from llama405b_tools.plan import format_expectation

A = Host("a", "hosts:1")
LARGE = parse_llama(json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-405b"], "405B")
OWN = {
    "a": [("eth0", "172.31.1.5"), ("ib0", "10.0.0.1")],
    "b": [("eth0", "172.31.2.5"), ("ib0", "10.0.0.2")],
    "c": [("ib0", "10.0.0.3")],
}


def facts(own, head=None):
    """What a host that has all it needs says."""
    addresses = tuple(Address(*entry) for entry in own)
    return LaunchFacts(
        versions={}, tmux=True, tmux_fault="", ip=True, run_exists=False, attempt=0, owner="", alive=False, others=(), leftovers=(),
        machine="m", gpus=0, rdma=Rdma(), cores=2, port_fault="", port_in_use=False, own=addresses, head=head or {},
        workdir="/w", run_place=DirectoryCheck("/w/runs/r"), places={}, free_bytes=1 << 40, free_files=None, input_fault="",
    )  # fmt: skip


def fault_of(request, host, said):
    """Why a host is not fit; '' if it is."""
    return preflight.unfit_hosts(request, [host], {host.name: said}).get(host.name, "")


def answers(*faults):
    """What three hosts say; ``faults``: (host, address of the head) that do not meet."""
    found = {}
    for name, own in OWN.items():
        tried = {}
        for interface, address in OWN["a"] if name != "a" else ():
            fault = "no answer within 3 s" if (name, address) in faults else ""
            mine = dict(own).get(interface, own[-1][1])
            tried[address] = HeadRoute(fault, mine, interface)
        found[name] = facts([(i, a, "1000") for i, a in own], tried)
    return found


def test_the_first_address_that_all_reach():
    said = answers(("b", "172.31.1.5"), ("c", "172.31.1.5"))
    candidates = preflight.head_candidates(A, said["a"])
    assert candidates[:2] == ["172.31.1.5", "10.0.0.1"]
    way = preflight.find_rendezvous(A, candidates[:2], said, 20_000)
    assert (way.head, way.port) == ("10.0.0.1", 20_000)
    assert way.address == {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    assert way.interface == {"a": "ib0", "b": "ib0", "c": "ib0"}


def test_who_does_not_get_there_is_told_what_was_tried():
    said = answers(("b", "172.31.1.5"), ("b", "10.0.0.1"))
    assert preflight.find_rendezvous(A, ["172.31.1.5", "10.0.0.1"], said, 20_000) is None
    faults = preflight.hosts_cut_off(A, said, 20_000)
    assert list(faults) == ["b"]
    assert "172.31.1.5 (no answer within 3 s), 10.0.0.1 (no answer within 3 s)" in faults["b"]


def test_a_name_without_an_address_is_not_called_a_firewall():
    said = {"a": facts([]), "b": facts([], {"train-1": HeadRoute("Name or service not known", unresolved=True)})}
    why = preflight.hosts_cut_off(A, said, 20_000)["b"]
    assert (
        "at train-1 (Name or service not known); put the name into /etc/hosts on all hosts, or give a an IP address"
        in why
    )
    assert "open TCP ports" not in why


def test_hosts_with_ipv6_alone_are_told_that_the_hosts_meet_over_ipv4():
    eth0 = [("eth0", "172.31.1.5", "1000")]
    refused = {"fd99::12": HeadRoute("Connection refused")}
    for own, who in (({"a": eth0, "b": []}, "b"), ({"a": [], "b": eth0}, "a"), ({"a": [], "b": []}, "ab")):
        why = preflight.hosts_cut_off(A, {"a": facts(own["a"]), "b": facts(own["b"], refused)}, 20_000)
        advice = "hosts meet over IPv4; give it an address that all of them reach"
        assert why == dict.fromkeys(who, f"has no IPv4 address, but {advice}")


def test_address_in_the_hosts_file_is_the_only_candidate():
    assert preflight.head_candidates(Host("a", "hosts:1", address="10.0.0.1"), answers()["a"]) == ["10.0.0.1"]
    for line in ("localhost", "a address=localhost", "a address=127.0.1.1", "a address=::1"):
        assert preflight.head_candidates(parse_hosts(line, "hosts")[0], answers()["a"]) == ["127.0.0.1"]


def test_fast_private_networks_come_first():
    own = [
        ("eth0", "8.8.4.4", "100000"),
        ("eth1", "192.168.1.5", "1000"),
        ("ib0", "10.0.0.1", "400000"),
        ("x", "10.9.9.9", "-1"),
    ]
    answer = facts(own)
    assert preflight.head_candidates(A, answer)[:4] == ["10.0.0.1", "192.168.1.5", "10.9.9.9", "8.8.4.4"]


def test_a_program_that_no_host_has_is_refused_and_one_that_some_lack_is_their_fault():
    request = parse_launch(["--run", "r", "--", "train.py", "an argument"], 0.0)
    has, lacks = facts([]), dataclasses.replace(facts([]), has_program=False)
    with pytest.raises(
        UserError, match=r"^train\.py: no host has it in its working directory; correct the name, or copy"
    ):
        preflight.check_request(request, {"a": lacks, "b": lacks}, 20_000)
    preflight.check_request(request, {"a": has, "b": lacks}, 20_000)
    assert fault_of(request, A, lacks) == "train.py is not in /w; copy it there"
    assert "train.py" not in fault_of(request, A, has)


@pytest.mark.parametrize(
    ("more", "program"), [([], ("a.py", "x")), (["--setup-line", "cd b"], ()), (["--env", "PYTHONPATH=b"], ())]
)
def test_a_program_that_the_runs_own_environment_may_bring_is_not_looked_for(more, program):
    request = parse_launch(["--run", "r", *more, "--", "a.py", "x"], 0.0)
    assert preflight._probe_request(request, A, 20_000, "token").program == program


def test_gloo_takes_an_interfaces_first_address():
    said = {"a": facts([("eth0", "172.31.1.5", ""), ("eth0", "10.0.0.1", "")])}
    way = Rendezvous("10.0.0.1", 20_000, {"a": "10.0.0.1"}, {"a": "eth0"})
    assert "its eth0 has 172.31.1.5 before 10.0.0.1" in preflight.hidden_addresses(way, said)["a"]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"alive": True, "stopped_by": "you@there"}, "'r' is being stopped by you@there and still runs on a; once it"),
        ({"alive": True, "alive_as": ("b",)}, "'r' is running on a; "),
        ({"alive_as": ("gpu-1", "gpu-2")}, "'r' is running on a as gpu-[1-2]; "),
        ({"input_fault": "it holds checkpoints"}, "a: it holds checkpoints"),
    ],
)
def test_what_is_refused_before_anything_starts(seen, words):
    request = parse_launch(["--run", "r", "--preset", "demo", "--checkpoint.dir", "/c"], 0.0)
    with pytest.raises(UserError) as refused:
        preflight.check_request(request, {"a": dataclasses.replace(facts([]), **seen)}, 20_000)
    assert words in str(refused.value)


def test_a_restart_on_some_of_its_hosts_is_not_refused_for_what_the_others_have():
    request = parse_launch(["--run", "r", "--preset", "demo", "--resume", "auto"], 0.0)
    answers = {"a": dataclasses.replace(facts([]), alive_as=("b",), run_exists=True)}
    preflight.check_request(request, answers, 20_000, is_restart=True)


def test_an_evaluation_without_training_never_gets_into_the_directory_of_another_run():
    only = ["--run", "r", "--preset", "demo", "--evaluate-only", "--resume", "runs/r/checkpoints/step-00000040"]
    with pytest.raises(UserError, match=r"--run: 'r' exists on a; choose another name$"):
        preflight.check_request(parse_launch(only, 0.0), {"a": dataclasses.replace(facts([]), run_exists=True)}, 20_000)


def test_an_evaluation_without_training_needs_no_room_for_what_training_takes():
    request, plan, said = planned(("--evaluation.paths", "x", "--evaluate-only"), [{"llama": LARGE}] * 3)
    preflight.check_training(request, plan, said)  # 24 ranks, where the global batch is 64
    assert outlook("--evaluation.paths", "x", "--evaluate-only") is None


@pytest.mark.parametrize(("resume", "asked"), [("no", "/c"), ("auto", ""), ("40", "")])
def test_the_head_is_asked_for_checkpoints_only_if_none_is_resumed(monkeypatch, tmp_path, resume, asked):
    monkeypatch.chdir(tmp_path)
    request = parse_launch(["--run", "r", "--preset", "demo", "--checkpoint.dir", "/c", "--resume", resume], 0.0)
    with FakeFleet("ab") as fleet:
        preflight.probe_hosts(request, list(fleet.hosts.values()), fleet)
        probes = {name: host.heard[0][1] for name, host in fleet.fakes.items()}
    assert (probes["a"].inputs.new_checkpoints, probes["b"].inputs) == (asked, None)


def test_hosts_are_asked_for_the_packages_that_settings_need(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [
        "--run",
        "r",
        "--preset",
        "demo",
        "--parallel.numerics",
        "fp8",
        "--model.compile",
        "true",
        "--tracking.to",
        "tensorboard",
    ]

    def asked(*more):
        with FakeFleet("ab") as fleet:
            preflight.probe_hosts(parse_launch([*words, *more], 0.0), list(fleet.hosts.values()), fleet)
            return {name: host.heard[0][1].extras for name, host in fleet.fakes.items()}

    assert asked() == {"a": ("torchao", "tensorboard"), "b": ("torchao",)}
    assert asked("--env", "PYTHONPATH=/somewhere") == {"a": (), "b": ()}  # which may bring them
    said = fault_of(parse_launch(words, 0.0), A, dataclasses.replace(facts([]), lacks=("tensorboard",)))
    assert said == (
        "tensorboard is not installed for its python, and the settings need it; run `pip install tensorboard` there"
    )


def test_a_directory_that_holds_checkpoints_is_refused_on_the_head(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_facts.models, "check_checkpoint", lambda *_, **__: LARGE)
    monkeypatch.setattr(launch_facts.corpus, "check_paths", lambda *_, **__: None)
    (tmp_path / "c/step-00000040").mkdir(parents=True)
    seen = [launch_facts._check_inputs(InputCheck("m", 64, 0, False, (), where)) for where in ("c", "", "other")]
    assert seen[0][0].startswith("--checkpoint.dir: c holds checkpoints up to step-00000040; use another directory")
    assert seen[1:] == [("", LARGE), ("", LARGE)]
    without, _ = launch_facts._check_inputs(InputCheck("m", 64, 0, False, (), template="none.jinja"))
    lacking, _ = launch_facts._check_inputs(InputCheck("m", 64, 0, False, (), adapter=Adapter("lora", path="none")))
    assert (
        lacking
        == "--adapter.path: none/adapter_config.json is not a file; name a directory that peft or export --adapter wrote"
    )
    assert without.startswith("--data.chat_template: none.jinja: cannot be read (No such file")


def saving(*more):
    return parse_launch(["--preset", "demo", "--run", "r", *more], now=0.0)


def of(uid, user, runs):
    return dataclasses.replace(facts([]), uid=uid, user=user, runs=runs)


def test_users_who_cannot_read_each_others_checkpoints_are_refused():
    said = {"a": of(0, "root", "1"), "b": of(1001, "alice", "2"), "c": of(0, "root", "3")}
    faults = preflight.user_faults(saving("--checkpoint.dir", "/shared/c"), said)
    assert faults == {
        "b": "the run would be alice's there (uid 1001), but root's on a (uid 0), and neither can read what the other "
        "writes in /shared/c; log in as one user everywhere, or save nothing with --checkpoint.every 0"
    }
    assert preflight.user_faults(saving("--checkpoint.every", "0"), said) == {}
    assert preflight.user_faults(saving("--checkpoint.storage", "local"), said) == {}


def test_users_who_share_the_directory_of_runs_are_refused():
    said = {"a": of(0, "root", "1"), "b": of(1001, "alice", "1")}
    faults = preflight.user_faults(saving("--checkpoint.every", "0"), said)
    assert "writes in /w/runs; log in as one user everywhere, or give each a workdir= of its own" in faults["b"]
    same = {"a": of(1001, "alice", "1"), "b": of(1001, "bob", "1")}  # files know numbers, not names
    assert preflight.user_faults(saving(), same) == {}


def test_the_directory_of_checkpoints_is_tried_before_the_start():
    asked = preflight._probe_request(saving("--checkpoint.dir", "/shared/c"), A, 20_000, "token")
    assert asked.places == {"--checkpoint.dir": "/shared/c"}
    said = dataclasses.replace(
        facts([]), places={"--checkpoint.dir": DirectoryCheck("/shared/c", DirectoryFault.DENIED, "/shared", "bob")}
    )
    assert "--checkpoint.dir=/shared/c cannot be created or written" in fault_of(saving(), A, said)
    assert preflight._probe_request(saving("--checkpoint.every", "0"), A, 20_000, "token").places == {}


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({}, ""),
        ({"tmux": False}, "tmux is not installed; install it (apt-get update && apt-get install tmux)"),
        (
            {"tmux_fault": "no answer within 10 s"},
            "its tmux does not work (`tmux -V`: no answer within 10 s); run `tmux new -d true` there to see why",
        ),
        (
            {"free_files": 3},
            "its disk is out of inodes (3 more files can be created at /w); delete files, or set workdir=",
        ),
        (
            {"run_place": DirectoryCheck("/w/runs/r", DirectoryFault.DENIED, "/w", "bob")},
            "/w/runs/r cannot be written: /w belongs to bob, and you cannot write it; fix that, or set workdir=",
        ),
        (
            {"places": {"cache": DirectoryCheck("/nvme/hf", DirectoryFault.DANGLING, "/nvme")}},
            "cache=/nvme/hf cannot be created or written: /nvme is a link to nothing; name a directory of your own",
        ),
    ],
)
def test_what_a_host_lacks_is_found_before_the_start(lacks, said):
    request = parse_launch(["--run", "r", "--", "x.py"], 0.0)
    why = fault_of(request, A, dataclasses.replace(facts([]), **lacks))
    assert why.startswith(said)
    assert bool(why) == bool(said)


HIDE = "and hide that GPU from CUDA: --setup-line 'export CUDA_VISIBLE_DEVICES=…'"
HUNG = "nvidia-smi does not answer: a GPU or the driver hangs"


@pytest.mark.parametrize(
    ("slots", "gpus", "fault", "said"),
    [
        (8, 7, "", "it has 7 GPUs, but slots=8; check nvidia-smi, or set slots=7"),
        (8, 0, HUNG, f"it has 0 GPUs ({HUNG}), but slots=8; check nvidia-smi, or train on CPUs: --parallel.device cpu"),
        (0, 7, "GPU 5: lost", f"it has 7 GPUs (GPU 5: lost); check nvidia-smi, or set slots=7 {HIDE}"),
        (7, 7, "GPU 5: lost", ""),
        (2, 0, "", ""),  # it has none
    ],
)
def test_a_host_has_the_gpus_that_its_ranks_need(slots, gpus, fault, said):
    host, has = dataclasses.replace(A, slots=slots), dataclasses.replace(facts([]), gpus=gpus, gpu_fault=fault)
    flags = ["--run", "r", "--model.path", "m", "--data.paths", "x"]
    assert fault_of(parse_launch(flags, 0.0), host, has) == said
    assert fault_of(parse_launch([*flags, "--parallel.device", "cpu"], 0.0), host, has) == ""


def test_a_disk_that_became_read_only_is_the_hosts_fault_and_not_the_names():
    request = parse_launch(["--run", "r", "--resume", "auto", "--", "x.py"], 0.0)
    place = DirectoryCheck("/w/runs/r", DirectoryFault("read-only"), "/w/runs/r")
    answer = dataclasses.replace(facts([]), run_exists=True, run_place=place)
    preflight.check_request(request, {"a": answer}, 1)
    assert fault_of(request, A, answer) == (
        "/w/runs/r cannot be written: the filesystem of /w/runs/r is read-only (after an I/O error, dmesg says why); "
        "fix that, or set workdir="
    )


@pytest.mark.parametrize("resume", ["no", "auto"])
def test_a_run_directory_of_another_user_is_a_name_to_avoid(resume):
    request = parse_launch(["--run", "r", "--resume", resume, "--", "x.py"], 0.0)
    place = DirectoryCheck("/w/runs/r", DirectoryFault.DENIED, "/w/runs/r", "bob")
    said = {"a": dataclasses.replace(facts([]), run_exists=True, run_place=place)}
    with pytest.raises(
        UserError, match="--run: 'r' on a: /w/runs/r belongs to bob, and you cannot write it; choose an"
    ):
        preflight.check_request(request, said, 1)


def planned(flags, each, mbit="25000"):
    """The request, the plan and the answers of three hosts, with these facts each."""
    request = parse_launch(["h", "--run", "r", "--model.path", "/m", "--data.paths", "d", *flags], 0.0)
    said = {
        name: dataclasses.replace(facts([("ib0", f"10.0.0.{n}", mbit)]), **more)
        for n, (name, more) in enumerate(zip("abc", each, strict=True), 1)
    }
    way = Rendezvous("10.0.0.1", 20_000, {name: said[name].own[0].address for name in said}, dict.fromkeys(said, "ib0"))
    hosts = [Host(name, "h:1", slots=8) for name in said]
    parts = [preflight.host_spec(host, said[host.name], way) for host in hosts]
    return request, preflight.build_launch_plan(request, parts, said, way, 0.0), said


def note(*flags, has=(812, 812, 812), mbit="25000"):
    """What launch says about loading on three hosts with so many GB of the weights."""
    return loading_note(*planned(flags, [{"weights_bytes": size * 10**9} for size in has], mbit))


def room_of(*free_gb, llama=LARGE):
    """What three hosts with so much room say."""
    places = [{"--checkpoint.dir": DirectoryCheck("/c", free_bytes=size * 10**9)} for size in free_gb]
    return [{"places": each, "llama": llama} for each in places]


def room(*flags, free_gb=(5000, 5000, 5000), llama=LARGE):
    """What launch says of three hosts' disks for checkpoints."""
    return disk_room_faults(*planned(flags, room_of(*free_gb, llama=llama)))


@pytest.mark.parametrize(("free_gb", "short"), [(390, []), (370, ["a"])])
def test_a_rehearsal_needs_room_for_the_few_checkpoints_that_it_keeps(free_gb, short):
    small = dataclasses.replace(LARGE, layers=2)
    request, plan, said = planned(
        ("--checkpoint.dir", "/c", "--checkpoint.keep", "9"), room_of(free_gb, 0, 0, llama=small)
    )
    assert list(disk_room_faults(rehearsal_request(request), plan, said)) == short
    assert list(disk_room_faults(request, plan, said)) == ["a"]


def test_disks_are_counted_before_a_launch():
    # 12 bytes a parameter, 3 checkpoints: 14,611 GB in one place, or 9,740 GB with a copy on each of three hosts.
    said = room("--checkpoint.dir", "/c")
    assert list(said) == ["a"]
    assert said["a"].startswith(
        "--checkpoint.dir: /c has 5,000.00 GB free, but a checkpoint takes 4,870.24 GB, 2 are kept"
    )
    node = ("--checkpoint.dir", "/c", "--checkpoint.storage", "local")
    assert list(room(*node, free_gb=(9741, 9740, 9800))) == ["b"]
    assert room(*node, "--checkpoint.replicas", "0") == {}
    keeps_four = room(*node, "--checkpoint.keep", "4", free_gb=(9800, 9800, 20_000))
    assert [fault.endswith("use --checkpoint.keep 2, or another directory") for fault in keeps_four.values()] == [
        True
    ] * 2
    uneven = [Node(name, slots, 0, "", "", "", "", {}) for name, slots in (("a", 6), ("b", 1), ("c", 1))]
    request, plan, said = planned(node, room_of(9740, 9740, 9740))
    plan = dataclasses.replace(plan, nodes=tuple(uneven))
    # Of 8 ranks a has 6 and a copy of c's one, b has one and a copy of a's six, c has two: 12,784 GB twice, and 3,653 GB.
    assert list(disk_room_faults(request, plan, said)) == ["a", "b"]
    assert room("--checkpoint.dir", "/c", "--resume", "auto") == {}
    assert room("--checkpoint.dir", "/c", "--checkpoint.every", "0") == {}
    assert room("--checkpoint.dir", "/c", llama=None) == {}


def outlook(*flags, gpu="NVIDIA H100 80GB HBM3", mib=81559, llama=LARGE, ram_gib=2000, measured=None, **more):
    """What launch expects of a run on three hosts of eight such GPUs."""
    has = {"gpu": gpu, "gpu_bytes": mib << 20, "llama": llama, "memory_bytes": ram_gib << 30, **more}
    return predict_launch(*planned(("--training.global_batch_size", "24", *flags), [has] * 3), measured)


def misfit(found):
    """Why it is refused; '' if it is not."""
    try:
        refuse_misfit(found)
    except UserError as error:
        return str(error).partition("; `llama405b plan`")[0]
    return ""


def test_what_cannot_fit_is_known_before_a_launch():
    offloaded = ("--parallel.offload", "optimizer", "--data.seq_len", "2048")
    found = outlook(*offloaded, ram_gib=4000)
    assert (misfit(found), found.run.hosts, found.run.ranks_per_host) == ("", 3, 8)
    assert found.cluster.gpu.name == "h100-80"
    assert found.cluster.nic_bytes_per_s == 25e9 / 8  # its link's, without RDMA
    assert outlook(*offloaded, mib=0) is None
    assert misfit(outlook()).startswith("a GPU has 79.1 GiB, but a rank would allocate about 283.4 at ")
    tight = outlook(*offloaded, ram_gib=4000)
    assert (tight.gpu_fit, misfit(tight)) == (Fit.RETRIES, "")
    assert "reserved of 79.1 GiB of each GPU; slower, with allocator retries; " in format_expectation(tight)
    assert misfit(outlook(*offloaded)) == ""  # 2,022 of 2,000 GiB: within what the prediction may be wrong
    assert (
        misfit(outlook(*offloaded, ram_gib=1500))
        == "a host has 1,500 GiB of memory, but the run would take about 2,022"
    )
    assert misfit(
        outlook("--parallel.offload", "all", "--data.seq_len", "8192", gpu="NVIDIA L40S", mib=46068, ram_gib=9000)
    ).endswith("allocate about 65.0 at the backward of a layer's MLP")
    assert outlook("--parallel.device", "cpu") is None
    assert outlook("--model.activation_checkpointing", "none").needs.gpu_bytes > outlook().needs.gpu_bytes
    assert outlook("--parallel.strategy", "fsdp1") is None
    assert outlook(gpu="NVIDIA Q9000") is None
    assert outlook(llama=None) is None
    request, plan, said = planned((), [{"llama": LARGE, "gpu": name, "gpu_bytes": 1 << 36} for name in "abc"])
    assert predict_launch(request, plan, said, None) is None


def test_what_was_measured_is_expected():
    flags = ("--parallel.offload", "optimizer")
    plain = outlook(*flags)
    few, more = (MeasuredStep(layers, 1, 24, 0.0, 0.1 * layers, 0.3 * layers, 0.5, 20 << 30) for layers in (1, 3))
    alone = StandaloneRates(0.3, 1e12, 100e9, 20e9, 100e9, 90e9, 1e-5, 2e9)
    measured = Calibration(plain.run, few, more, None, alone, ("a", "b", "c"), "h100-80", "today")
    assert outlook(*flags, measured=measured).needs.step_s == pytest.approx(126 * 0.4 + 0.5)
    assert outlook("--parallel.offload", "all", measured=measured).calibration == measured
    assert outlook(*flags, measured=dataclasses.replace(measured, gpu="h200-141")) == plain
    on_cpus = dataclasses.replace(plain.run, offload="none")
    measured = dataclasses.replace(measured, load=on_cpus, gpu="cpu")
    assert outlook("--parallel.device", "cpu", measured=measured).cluster.gpu.is_cpu


def test_launch_says_how_loading_would_be_faster():
    assert note() == ""
    assert note("--model.load", "rank0") == (
        "note: all hosts have the weights; --model.load auto avoids sending 541 GB from rank 0, at least 173 s"
    )
    sends = "note: c without the weights: rank 0 sends 541 GB"
    push = "; `llama405b push --shards a:/m h` copies each host's shards once"
    assert note(has=(812, 101, 0)) == f"{sends}, at least 173 s{push}"
    mesh = note("--parallel.tp", "4", "--parallel.strategy", "hsdp", has=(812, 101, 0))
    assert "`llama405b push --shards a:/m h --parallel.strategy=hsdp --parallel.tp=4`" in mesh
    assert note(has=(812, 101, 0), mbit="-1") == f"{sends}{push}"
    for silent in ("--model.load", "local"), ("--resume", "auto"):
        assert note(*silent, has=(812, 101, 0)) == ""
    assert note(has=(1, 0, 0)) == ""  # seconds


def test_hosts_are_asked_for_weights_that_are_files(monkeypatch):
    for flags, asked in (((), "/m"), (("--model.weights", "random"), "")):
        request = parse_launch(["h", "--run", "r", "--model.path", "/m", "--data.paths", "d", *flags], 0.0)
        assert preflight._probe_request(request, A, 20_000, "token").weights == asked
    assert preflight._probe_request(parse_launch(["--run", "r", "--", "a.py"], 0.0), A, 1, "t").weights == ""


def test_weights_are_counted_only_where_they_can_be_loaded(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    files = sorted(model.glob("*.safetensors"))
    found = launch_facts._weights_bytes(str(model))
    assert 0 < sum(file.stat().st_size for file in files) - found < 2000 * len(files)  # but the headers
    assert launch_facts._weights_bytes(str(model / "none")) == 0
    files[0].unlink()
    assert launch_facts._weights_bytes(str(model)) == 0


def test_a_mesh_that_the_model_forbids_is_refused_before_anything_starts():
    batch = ["--training.global_batch_size", "24", "--training.micro_batch_size", "1", "--parallel.cp", "8"]
    preflight.check_training(*planned([*batch, "--data.seq_len", "4096"], [{"llama": LARGE}] * 3))
    with pytest.raises(UserError, match=r"^--parallel\.cp: 4090 tokens of a sequence cannot be divided by 8"):
        preflight.check_training(*planned([*batch, "--data.seq_len", "4090"], [{"llama": LARGE}] * 3))


def test_a_resume_that_another_batch_size_forbids_is_refused_before_anything_starts(tmp_path, monkeypatch):
    given = ["--run", "r", "--resume", "--model.path", "m", "--data.paths", "d", "--training.max_steps", "9"]
    settings = parse_launch(given, 0.0).config
    identity = RunIdentity("m", "d", 4096, 64, "fp32-master", 0, 0, "isolated", update_settings(settings.optimizer, 9))
    step = tmp_path / "step-00000004"
    step.mkdir()
    seals = {name: FileDigest(0, 0, ("0" * 64,)) for name in (INDEX, "weights-0-0.safetensors")}
    (step / "manifest.json").write_bytes(write_manifest(Manifest(3, 4, seals, 1, identity=identity))[0])

    def launch(*more):
        request = parse_launch([*given, "--checkpoint.dir", str(tmp_path), *more], 0.0)
        asked = preflight._input_check(request)
        found = machine.find_resume_checkpoint(asked.resume, asked.checkpoints)
        said = {"a": dataclasses.replace(facts([]), resumable=found), "b": facts([])}
        nodes = tuple(Node(name, 1, i, "/w", "/py", "", "", {}) for i, name in enumerate("ab"))
        plan = Plan("r", 2, 0.0, "r", "a:1", request.training_program(), (), nodes)
        preflight.check_training(request, plan, said)

    launch()
    launch("--training.global_batch_size", "32", "--checkpoint.allow_changes", "training.global_batch_size")
    for change in (
        ["--training.global_batch_size", "32"],
        ["--training.global_batch_size", "0"],
        ["--optimizer.lr", "1"],
    ):
        with pytest.raises(UserError, match=f"^--resume: {step} was saved with other settings"):
            launch(*change)
    monkeypatch.setattr(slurm.shutil, "which", lambda _: "/usr/bin/sbatch")
    monkeypatch.chdir(tmp_path)
    request = parse_launch([*given, "--checkpoint.dir", str(tmp_path), "--slurm", "-N 2", "--optimizer.lr", "1"], 0.0)
    with pytest.raises(UserError, match=f"^--resume: {step} was saved with other settings"):
        slurm.submit(request, "-N 2")
