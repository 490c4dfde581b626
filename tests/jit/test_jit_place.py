"""The rules for directories that hold code: the table of docs/security.md, cell by cell."""

import os
import re
import stat
from pathlib import Path

import pytest
from forks import needs_root

from sonicmoe.jit import place as place_module
from sonicmoe.jit.place import Place, Trust, UntrustedPlaceError

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
COLUMNS = (Trust.SHARED, Trust.ANYBODY, Trust.OWNER)
STRANGER = 54321  # a user that need not exist


def made(path, mode, owner=None):
    path.mkdir()
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, -1)
    return path


def below(folder, mode, owner=None, of_cache=None):
    return made(made(folder / "above", mode, owner) / "cache", 0o755, of_cache)


def linked(folder, owner=None):
    """A cache behind a link that lies where every user can make one."""
    link = made(folder / "open", 0o1777) / "link"
    link.symlink_to(made(folder / "real", 0o755))
    if owner is not None:
        os.chown(link, owner, -1, follow_symlinks=False)
    return link


def with_link_inside(folder):
    cache = made(folder / "cache", 0o755)
    (cache / "artefacts").symlink_to(made(folder / "elsewhere", 0o755))
    return cache


def with_entry_of_a_stranger(folder):
    cache = made(folder / "cache", 0o755)
    made(cache / "artefacts", 0o755, STRANGER)
    return cache


SCENES = {
    **{f"mine, mode {mode:o}": lambda folder, mode=mode: made(folder / "cache", mode)
       for mode in (0o755, 0o700, 0o2775, 0o777, 0o1777)},
    "of another user, mode 755": lambda folder: made(folder / "cache", 0o755, STRANGER),
    "of another user, in a directory of mode 1777":
        lambda folder: below(folder, 0o1777, of_cache=STRANGER),
    "below a directory of mode 755 of another user": lambda folder: below(folder, 0o755, STRANGER),
    "below a directory of mode 775": lambda folder: below(folder, 0o775),
    "below a directory of mode 777": lambda folder: below(folder, 0o777),
    "below a directory of mode 1777": lambda folder: below(folder, 0o1777),
    "reached through a link of mine": linked,
    "reached through a link of another user": lambda folder: linked(folder, STRANGER),
    "with a link inside": with_link_inside,
    "mine, with an entry of another user": with_entry_of_a_stranger,
}  # fmt: skip


def table():
    """First column → the three others."""
    text = PAGE.read_text(encoding="utf-8").split("| directory | cache directory |", 1)[1]
    lines = text.split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: tuple(row[1:]) for row in cells}


def scene_of(row):
    return max((name for name in SCENES if row.startswith(name)), key=len)


def test_every_row_has_its_scene_and_every_scene_its_row():
    assert sorted(map(scene_of, table())) == sorted(SCENES)
    assert {cell for row in table().values() for cell in row} == {"used", "refused"}


@pytest.mark.parametrize("trust", COLUMNS, ids=str)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=needs_root if "another" in row else []) for row in table()]
)
def test_the_page_says_what_happens(tmp_path, row, trust):
    root = SCENES[scene_of(row)](tmp_path)
    place = Place.of(root, trust)
    found = "used"
    try:
        assert os.path.samefile(place.checked(), root)
        (place / "artefacts").checked(make=True)
    except UntrustedPlaceError as error:
        found = "refused"
        assert str(tmp_path) in str(error)
    assert found == table()[row][COLUMNS.index(trust)]


def test_commands_of_the_page_make_a_group_cache(tmp_path):
    """The modes in its example are those that let a group in and nobody else."""
    (mode,) = re.findall(r"chmod (2\d{3}) /shared/sonicmoe", PAGE.read_text(encoding="utf-8"))
    root = made(tmp_path / "cache", int(mode, 8))
    made_below = (Place.of(root, Trust.SHARED) / "artefacts").checked(make=True)
    assert stat.S_IMODE(made_below.stat().st_mode) == int(mode, 8)


def test_new_directories_are_closed_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        for trust, mode in ((Trust.OWNER, 0o700), (Trust.SHARED, 0o775)):
            root = tmp_path / trust.value / "cache"
            made_below = (Place.of(root, trust) / "artefacts").checked(make=True)
            assert stat.S_IMODE(made_below.stat().st_mode) == mode
            assert stat.S_IMODE(root.stat().st_mode) == mode
            assert stat.S_IMODE(root.parent.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_root_of_the_host_in_a_container(monkeypatch, tmp_path):
    """Its directories appear as those of `nobody`. They pass above a cache, and nowhere else."""
    nobody = STRANGER
    monkeypatch.setattr(place_module, "_unmapped_user", lambda: nobody)

    def judged(inside, anybody_makes):
        status = os.stat_result((0o40755, 1, 1, 1, nobody, 0, 0, 0, 0, 0))
        try:
            place_module._judge(
                Trust.OWNER, status, tmp_path, inside=inside, anybody_makes=anybody_makes
            )
        except UntrustedPlaceError:
            return False
        return True

    assert judged(inside=False, anybody_makes=False)
    assert not judged(inside=True, anybody_makes=False)
    assert not judged(inside=False, anybody_makes=True)
