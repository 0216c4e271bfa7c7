import subprocess

import pytest

from llama405b.contract.errors import UserError
from llama405b_tools.deliver import setup_plan
from llama405b_tools.deliver.setup_plan import SetupOptions

BARE = {
    "arch": "x86_64",
    "uid": "1000",
    "python": "3.12",
    "venv": "yes",
    "has_tmux": "yes",
    "has_ip": "yes",
    "has_apt-get": "yes",
    "driver": "",
}


def lines(facts=None, **wishes):
    return {
        step.name: step.line
        for step in setup_plan.plan_setup(BARE | (facts or {}), SetupOptions(stamp="s", **wishes), "3.12 x86_64")
    }


def test_facts_come_from_a_plain_shell():
    facts = setup_plan.parse_facts(
        subprocess.run(["sh", "-s"], input=setup_plan.FACTS_SCRIPT, capture_output=True, text=True, check=True).stdout
    )
    assert facts["arch"] in ("x86_64", "aarch64")
    assert facts["has_tar"] == "yes"
    assert facts["uid"].isdigit()


def test_the_systems_python_where_it_will_do():
    steps = lines()
    assert list(steps) == ["making .venv", "checking the disk", "installing packages", "checking"]
    assert "python3 -m venv --clear .venv" in steps["making .venv"]
    assert "-c constraints.txt -e '.[train]'" in steps["installing packages"]
    assert "--extra-index-url" not in steps["installing packages"]


@pytest.mark.parametrize(
    ("facts", "python"), [({"python": "3.10"}, "3.12"), ({"python": ""}, "3.12"), ({"venv": ""}, "python3")]
)
def test_uv_where_it_will_not(facts, python):
    facts = {key: value for key, value in (BARE | facts).items() if value or key == "driver"}
    steps = {s.name: s.line for s in setup_plan.plan_setup(facts, SetupOptions(stamp="s"), "")}
    assert f"uv venv -q --allow-existing --seed --python {python} .venv" in steps["making .venv"]
    assert "astral.sh/uv/install.sh" in steps["making .venv"]


@pytest.mark.parametrize(("driver", "build"), [("580.65.06", "cu130"), ("570.124.06", "cu128"), ("565.57.01", "cu126")])
def test_torchs_build_follows_the_driver(driver, build):
    assert f"/whl/{build} " in lines({"driver": driver})["installing packages"]
    assert "/whl/" not in lines({"driver": driver}, torch_index="none")["installing packages"]
    assert (
        "--extra-index-url https://mine/x "
        in lines({"driver": driver}, torch_index="https://mine/x")["installing packages"]
    )


def test_programs_by_root_or_sudo_or_not_at_all():
    bare = {key: value for key, value in BARE.items() if key not in ("has_tmux", "has_ip")}
    root = setup_plan.plan_setup(bare | {"uid": "0"}, SetupOptions(), "")[0]
    _, _, apt = root.line.partition(f"; done; {setup_plan.UNINTERRUPTED}")
    assert apt.startswith("apt-get update -qq && env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=")
    assert apt.endswith(" install -y -qq tmux iproute2")
    assert "sudo -n apt-get" in setup_plan.plan_setup(bare | {"sudo": "yes"}, SetupOptions(), "")[0].line
    by_hand = "run there as root: apt-get update && apt-get install -y tmux iproute2"
    with pytest.raises(UserError, match=by_hand):
        setup_plan.plan_setup(bare, SetupOptions(), "")
    with pytest.raises(UserError, match="run there as root: dnf install -y tmux iproute"):
        setup_plan.plan_setup(
            {key: value for key, value in bare.items() if key != "has_apt-get"} | {"has_dnf": "yes"}, SetupOptions(), ""
        )


def test_apt_is_not_waited_for_where_it_is_not_in_use():
    line = setup_plan.APT_IS_FREE.replace("/var/lib/apt/lists/lock", "/no/such/lock")
    assert subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=True).stdout == b""


def test_without_a_gpu_the_small_pytorch_is_taken_where_it_can_be_had():
    def step(facts):
        [found] = [
            s
            for s in setup_plan.plan_setup(BARE | facts, SetupOptions(stamp="s"), "")
            if s.name == "installing packages"
        ]
        return found

    small = step({"cpu_index": "yes"})
    assert "--extra-index-url https://download.pytorch.org/whl/cpu " in small.line
    assert small.download == "PyTorch for CPU: 0.3 GB to download"
    assert step({}).download == "0.3 GB to download; 2.7 GB if pip finds only PyTorch for CUDA"
    for gpu in ({"gpu": "yes"}, {"driver": "580.65.06"}):
        assert "/whl/cpu " not in step({"cpu_index": "yes"} | gpu).line
    assert step({"driver": "580.65.06"}).download == "PyTorch for CUDA: 2.7 GB to download"


def test_other_ways():
    assert lines(module="module load python/3.12")["checking"].startswith("module load python/3.12 && ")
    assert "conda run -n 'my env'" in lines(conda="my env")["finding the conda environment"]
    assert "--no-index --find-links .wheelhouse " in lines(offline=".wheelhouse")["installing packages"]
    container = setup_plan.plan_setup(BARE | {"has_apptainer": "yes"}, SetupOptions(container="docker://x/y:1"), "")
    assert "exec apptainer exec --nv" in container[0].line


@pytest.mark.parametrize(
    ("facts", "wishes", "words"),
    [
        ({}, {"container": "x"}, "--container: apptainer is missing"),
        ({"python": "3.11"}, {"offline": "w"}, "the wheels are for Python 3.12 x86_64, but it has 3.11 x86_64"),
        ({"driver": "470.1"}, {}, "driver 470.1 is too old"),
        ({"python": "3.9"}, {"python": "/opt/py"}, "--python: /opt/py is 3.9; use 3.11 or newer"),
    ],
)
def test_what_cannot_be_had(facts, wishes, words):
    with pytest.raises(UserError, match=words):
        lines(facts, **wishes)


def test_a_package_is_compiled_once_and_its_wheel_installed():
    folder, make, install = setup_plan.build_package("flash-attn>=2.7")
    assert make.line.startswith(f"ls {folder}/*.whl")  # a wheel that is there is not built again
    assert (
        f"pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w {folder}.new 'flash-attn>=2.7'"
        in make.line
    )
    assert install.line.endswith(f"--no-deps --no-index {folder}/*.whl")
    assert setup_plan.build_package("other")[0] != folder
