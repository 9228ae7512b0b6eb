"""The agent's folder: incarnations rise whatever the clock does."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentinker.trainer_agent.journal import FolderError, Journal


def test_a_later_incarnation_sorts_behind_an_earlier_one_also_when_the_clock_was_set_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "boot")
    made = [journal.next_incarnation(now, "ab") for now in (1_800_000_000_000, 1_799_992_800_000, 1_799_992_900_000, 1_800_000_500_000)]
    journal.close()
    names = [name for name, _ in made]
    assert [before for _, before in made] == [None, *names[:-1]], "each says which one it follows"
    assert names == sorted(set(names))
    assert names[-1] == "1800000500000-ab"


def test_what_is_no_incarnation_is_written_anew(tmp_path: Path) -> None:
    for broken in ("broken", "", "99999999999999999999-ab", "\u0661" * 13 + "-ab"):
        (tmp_path / "incarnation").write_text(broken)
        journal = Journal(tmp_path, "boot")
        assert journal.next_incarnation(5, "ab") == ("0000000000005-ab", None)
        journal.close()


def test_a_folder_that_cannot_be_used_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(FolderError, match=r"(lock|file): .*; set OPENTINKER_AGENT__DIRECTORY to a folder that this user may write"):
            Journal(place, "boot")


def test_a_journal_that_is_a_folder_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "journal.json").mkdir()
    journal = Journal(tmp_path, "boot")
    assert journal.read().entries == ()
    journal.write((), ())
    assert journal.read().entries == ()
    journal.close()
