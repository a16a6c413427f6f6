"""The journal's lines: what a full disk leaves."""

import os

import pytest

from verl_multiturn.journal import Journal, read_journal


def test_a_full_disk_leaves_no_half_for_the_next_record_to_be_joined_to(tmp_path, monkeypatch):
    path, write = tmp_path / "trees.jsonl", os.write
    journal = Journal(path)
    journal.append({"a": 1})
    left = [10, 0]  # bytes that go in, call by call

    def full(file, data):
        if not (room := left.pop(0)):
            raise OSError(28, "No space left on device")
        return write(file, data[:room])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append({"b": 2})
    journal.append({"c": 3})
    journal.close()
    assert list(read_journal(path, "it")) == [{"a": 1}, {"c": 3}]
