"""How much memory is free, by the machine or by the container."""

from llama405b.distributed import host_memory


def _cgroup(path, limit, used, cached):
    path.mkdir()
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    return path


def test_a_containers_limit_counts_and_its_file_cache_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "none")
    of_machine = host_memory.free_bytes()
    assert of_machine > 0
    monkeypatch.setattr(host_memory, "CGROUP", _cgroup(tmp_path / "limited", 5000, 3000, 1000))
    assert host_memory.free_bytes() == 3000
    monkeypatch.setattr(host_memory, "CGROUP", _cgroup(tmp_path / "full", 5000, 6000, 0))
    assert host_memory.free_bytes() == 0
    monkeypatch.setattr(host_memory, "CGROUP", _cgroup(tmp_path / "unlimited", "max", 3000, 0))
    assert host_memory.free_bytes() > of_machine / 2
