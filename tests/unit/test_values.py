"""No code makes a decision from the words of a message: if all are rewritten, every judgement stays the same."""

import ast
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

MANY = 3  # words: a literal of more is a sentence
FOREIGN = (  # tables of what other programs write, and the recording that the demo plays
    "llama405b/distributed/collectives.py", "tools/llama405b_tools/parsers.py",
    "tools/llama405b_tools/agent/hostprobe.py",
    "tools/llama405b_tools/agent/sampler.py",
)  # fmt: skip
JUDGING = (  # they assert values alone
    "tests/unit/run/test_judge.py", "tests/unit/run/test_follow.py", "tests/unit/guard/test_watchman.py",
    "tests/unit/top/test_situations.py", "tests/unit/run/test_status_values.py", "tests/unit/run/test_diagnose.py",
)  # fmt: skip


class Rewrite(ast.NodeTransformer):
    """Every sentence in other words; what stands in braces stays."""

    def __init__(self):
        self.count = 0

    def visit_JoinedStr(self, node):
        text = " ".join(part.value for part in node.values if isinstance(part, ast.Constant))
        for part in node.values:
            if isinstance(part, ast.Constant) and len(text.split()) > MANY:
                part.value = self.other(part.value)
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str) and len(node.value.split()) > MANY:
            node.value = self.other(node.value)
        return node

    def other(self, text):
        self.count += 1
        return re.sub(r"(\{[^}]*\})|(?<![%\w])[A-Za-z]{2,}", lambda found: found[1] or "zz", text)


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory):
    tree = tmp_path_factory.mktemp("rewritten")
    ignore = shutil.ignore_patterns("__pycache__", "data")
    for part in ("llama405b", "tools", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=ignore if part == "tests" else None)
    shutil.copytree(ROOT / "llama405b/data", tree / "llama405b/data", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    rewrite = Rewrite()
    for path in [*(tree / "llama405b").rglob("*.py"), *(tree / "tools").rglob("*.py")]:
        if str(path.relative_to(tree)).startswith(FOREIGN):
            continue
        parsed = rewrite.visit(ast.parse(path.read_text()))
        path.write_text(ast.unparse(ast.fix_missing_locations(parsed)))
    assert rewrite.count > 500
    return tree


def judge(tree):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *JUDGING]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
def test_judgements_do_not_depend_on_our_sentences(rewritten):
    done = judge(rewritten)
    assert done.returncode == 0, done.stdout[-3000:]
    said = subprocess.run(
        [sys.executable, "-c", "from llama405b.contract.records import CAUSE_TEMPLATES; print(CAUSE_TEMPLATES)"],
        cwd=rewritten, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "zz zz" in said.stdout  # they really are other words


@pytest.mark.slow
def test_one_that_does_is_found(rewritten):
    path = rewritten / "tools/llama405b_tools/run/judge.py"
    before = path.read_text()
    decides = re.compile(r"    if cause\.kind in \(CauseKind\.LOST_PEER, .*?\):\n")
    assert decides.search(before)
    by_words = "    from llama405b.contract.records import describe_cause\n"
    by_words += "    if 'lost contact with another rank' in describe_cause(cause):\n"
    path.write_text(decides.sub(by_words, before))
    try:
        assert judge(rewritten).returncode == 1
    finally:
        path.write_text(before)
