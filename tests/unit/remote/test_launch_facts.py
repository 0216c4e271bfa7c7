import pytest

from llama405b_tools.remote.launch_facts import has_program


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ((), True),
        (("train.py", "nosuch.py"), True),
        (("nosuch.py", "train.py"), False),
        (("folder",), False),
        (("-m", "json.tool"), True),
        (("--module", "no_such.module"), False),
        (("-m", ".relative"), True),  # torchrun's to refuse
        (("--no-python", "nvidia-smi"), True),  # torchrun's own options
    ],
)
def test_a_program_is_looked_for_and_not_run(tmp_path, monkeypatch, program, found):
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert has_program(program) is found
