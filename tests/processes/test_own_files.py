"""store/own_files.py: files, links and pipes of another user are not followed, are not changed and do not block."""

import contextlib
import os
import stat
from pathlib import Path

import pytest
from cases import cases

from effllm.config.settings import ConfigError, read_config
from effllm.store import own_files
from effllm.store.run_folder import RunFolder, StoreUnavailable, open_run_folder
from effllm.store.run_lock import Holder, status_of, take

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners of files")
OTHER_USER = 12345


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o027])
def test_folders_and_files_are_private_for_every_umask(tmp_path, umask):
    folder = tmp_path / "runs" / "deep" / "mine"
    before = os.umask(umask)
    try:
        RunFolder(folder, {"job": "x"}).close()
        os.close(own_files.open_file(folder / "file", os.O_WRONLY | os.O_CREAT))
    finally:
        os.umask(before)

    assert {mode(path) for path in (folder, folder.parent, folder.parent.parent)} == {0o700}
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) >= 4


@pytest.mark.faults
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_job_leaves_no_file_that_other_users_can_read(launch, tmp_path, umask):
    before = os.umask(umask)
    try:
        job = launch.python("loop.py", run_dir=tmp_path / "new" / "runs", run_name="mine").done()
    finally:
        os.umask(before)

    folder = tmp_path / "new" / "runs" / "mine"
    assert job.blocks
    assert mode(folder) == mode(folder.parent) == mode(folder.parent.parent) == 0o700
    left = {path: mode(path) for path in folder.rglob("*")}
    assert len(left) >= 6
    for path, bits in left.items():
        assert not bits & 0o077, path


def pipe(path):
    os.mkfifo(path)


def link(path):
    (path.parent / "precious").write_text("precious\n")
    path.symlink_to(path.parent / "precious")


def link_to_nothing(path):
    path.symlink_to(path.parent / "not there")


def second_name(path):
    (path.parent / "precious").write_text("precious\n")
    os.link(path.parent / "precious", path)


def folder(path):
    path.mkdir()


def device(path):
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def others(path):
    path.write_text("precious\n")
    os.chown(path, OTHER_USER, OTHER_USER)


def placed_by_root(place):
    return pytest.param(place, marks=[needs_root, pytest.mark.faults])


THINGS = [pipe, link, link_to_nothing, second_name, folder, placed_by_root(device), placed_by_root(others)]


@pytest.mark.parametrize("place", THINGS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_APPEND])
def test_only_regular_files_of_this_user_are_opened(tmp_path, place, flags):
    place(tmp_path / "file")

    with pytest.raises(OSError):
        own_files.open_file(tmp_path / "file", flags)

    precious = tmp_path / "precious"
    assert not precious.exists() or precious.read_text() == "precious\n"
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize("place", [pipe, link, second_name])
@pytest.mark.parametrize("name", ["events.jsonl", "windows-0001.jsonl", "ranks-0001.jsonl"])
def test_run_folder_does_not_write_through_pipes_and_links(tmp_path, place, name):
    place(tmp_path / name)

    with pytest.raises(OSError, match=r"not a regular file of this user|Too many levels"):
        RunFolder(tmp_path, {})

    precious = tmp_path / "precious"
    assert not precious.exists() or precious.read_text() == "precious\n"


@pytest.mark.parametrize("place", [pipe, link, second_name])
@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["summary.json", "run.json", "state.json"])
def test_pipe_or_link_instead_of_a_file_is_not_written_to(tmp_path, place, name):
    place(tmp_path / name)

    if name == "run.json":
        with pytest.raises(OSError):
            RunFolder(tmp_path, {})
    else:
        store = RunFolder(tmp_path, {})
        store.save_state(b"{}")
        assert status_of(tmp_path) == ""
        store.close()
    precious = tmp_path / "precious"
    assert not precious.exists() or precious.read_text() == "precious\n"


@pytest.mark.parametrize("place", [pipe, link, second_name])
def test_pipe_or_link_instead_of_a_lock_file_is_not_locked(tmp_path, place):
    place(tmp_path / "lock")

    with pytest.raises(OSError):
        take(tmp_path, Holder(), wait_s=0.0)


@needs_root
@pytest.mark.faults
def test_folder_of_another_user_is_rejected_with_the_reason(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER_USER, OTHER_USER)

    with pytest.raises(PermissionError, match="the folder belongs to another user"):
        own_files.make_folder(theirs)
    with pytest.raises(
        StoreUnavailable, match="cannot be written: the folder belongs to another user; set EFFICIENTLLM_RUN_DIR"
    ):
        open_run_folder(theirs, {})


def test_world_writable_folder_is_rejected(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    with pytest.raises(PermissionError, match="everybody can write to the folder: chmod o-w"):
        own_files.make_folder(tmp_path / "open")


@pytest.fixture
def public(tmp_path):
    """Return a folder with the mode of /tmp."""
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    return tmp_path / "public"


def test_run_folder_in_a_folder_with_the_mode_of_tmp_is_private(public):
    own_files.make_folder(public / "runs" / "mine")

    assert mode(public / "runs") == mode(public / "runs" / "mine") == 0o700


@needs_root
@pytest.mark.faults
@pytest.mark.parametrize("kind", ["folder", "link to a folder", "link to our own folder"])
def test_link_or_folder_of_another_user_in_tmp_is_rejected(public, tmp_path, kind):
    ours = tmp_path / "ours"
    ours.mkdir()
    if kind == "folder":
        (public / "runs").mkdir()
    else:
        target = ours if kind.endswith("our own folder") else tmp_path / "elsewhere"
        target.mkdir(exist_ok=True)
        (public / "runs").symlink_to(target)
    os.chown(public / "runs", OTHER_USER, OTHER_USER, follow_symlinks=False)

    with pytest.raises(PermissionError, match="runs belongs to another user"):
        own_files.make_folder(public / "runs" / "mine")


# --- folders of a group, as in projects ---


@pytest.fixture
def project(tmp_path):
    """Return a folder with mode 2770; a folder with files of a run is next to it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project").chmod(0o2770)
    (tmp_path / "precious" / "mine").mkdir(parents=True)
    for name in ("summary.json", "state.json", "run.json", "lock"):
        (tmp_path / "precious" / "mine" / name).write_text("precious")
    return tmp_path / "project"


def link_of_another(path, target):
    path.symlink_to(target)
    os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)


def folder_of_another(path, mode):
    path.mkdir()
    os.chown(path, OTHER_USER, OTHER_USER)
    path.chmod(mode)


def is_untouched(precious):
    return {path.name: path.read_text() for path in (precious / "mine").iterdir()} == dict.fromkeys(
        ("summary.json", "state.json", "run.json", "lock"), "precious"
    )


def test_run_folder_in_a_folder_of_a_group_is_private(project):
    own_files.make_folder(project / "runs" / "mine")

    assert {stat.S_IMODE(path.stat().st_mode) & 0o777 for path in (project / "runs", project / "runs" / "mine")} == {
        0o700
    }


@needs_root
def test_folder_of_a_group_member_on_the_path_is_accepted(project):
    folder_of_another(project / "experiments", 0o2770)

    own_files.make_folder(project / "experiments" / "runs" / "mine")


@needs_root
@pytest.mark.parametrize("way", ["runs", "experiments/runs", "own/runs"])
def test_link_of_another_user_in_a_folder_of_a_group_is_rejected(project, way):
    if way == "experiments/runs":  # folder of another user that the group cannot write to
        folder_of_another(project / "experiments", 0o755)
    elif way == "own/runs":  # link of this user to a link of another user
        (project / "own").symlink_to(project / "links")
        (project / "links").mkdir(mode=0o2770)
        (project / "links").chmod(0o2770)
    link_of_another(project / way, project.parent / "precious")

    with pytest.raises(PermissionError, match="runs belongs to another user"):
        own_files.make_folder(project / way / "mine")
    with pytest.raises(PermissionError, match="runs belongs to another user"):
        take(project / way / "mine", Holder(), wait_s=0.0)
    with pytest.raises(PermissionError, match="runs belongs to another user"):
        own_files.make_folder(project / way / "new" / "folder")
    assert is_untouched(project.parent / "precious")
    assert [path.name for path in (project.parent / "precious").iterdir()] == ["mine"]


@needs_root
def test_writable_folder_of_another_user_is_rejected(project):
    folder_of_another(project / "open", 0o2777)

    with pytest.raises(PermissionError, match="open belongs to another user"):
        own_files.make_folder(project / "open" / "mine")


def test_group_writable_run_folder_is_rejected(project):
    (project / "mine").mkdir()
    (project / "mine").chmod(0o2770)

    with pytest.raises(PermissionError, match="its group can write to the folder: chmod g-w"):
        own_files.make_folder(project / "mine")


def test_link_of_this_user_in_a_folder_of_a_group_is_followed(project):
    (project.parent / "scratch").mkdir()
    (project / "runs").symlink_to(project.parent / "scratch")

    RunFolder(project / "runs" / "mine", {"job": "x"}).close()

    assert (project.parent / "scratch" / "mine" / "run.json").exists()


@needs_root
def test_link_that_replaces_the_run_folder_is_not_followed(project):
    store = RunFolder(project / "runs" / "mine", {"job": "x"})
    (project / "runs").rename(project / "moved")
    link_of_another(project / "runs", project.parent / "precious")

    store.update_facts({"more": 1})
    assert not store.save_state(b"{}")
    store.write_file("summary.json", "ours")
    store.close()
    for change in (own_files.remove_file, lambda path: own_files.rename_file(path, "other")):
        with pytest.raises(PermissionError):
            change(project / "runs" / "mine" / "state.json")

    assert is_untouched(project.parent / "precious")


def test_circle_of_links_to_a_run_folder_raises_an_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")

    with pytest.raises(OSError, match="symbolic links"):
        own_files.make_folder(tmp_path / "a" / "mine")


def test_relative_links_and_dots_are_followed(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "link").symlink_to("../deep/./er")

    own_files.make_folder(tmp_path / "deep" / "link" / "mine")

    assert (tmp_path / "deep" / "er" / "mine").is_dir()


def test_own_files_closes_all_descriptors(project):
    before = len(list(Path("/proc/self/fd").iterdir()))
    own_files.make_folder(project / "runs" / "mine")
    for path in (project / "runs" / "mine" / "file", project / "missing" / "file"):
        with contextlib.suppress(OSError):
            own_files.replace_file(path, b"x")
            own_files.rename_file(path, "other")
            own_files.remove_file(path)

    assert len(list(Path("/proc/self/fd").iterdir())) == before


@needs_root
@pytest.mark.faults
def test_job_writes_no_run_behind_a_link_of_another_user(launch, project):
    link_of_another(project / "runs", project.parent / "precious")
    job = launch.python("loop.py", run_dir=project / "runs", run_name="mine").done()

    assert len(job.blocks) == 2
    assert job.stdout.count("runs belongs to another user") == 1
    assert is_untouched(project.parent / "precious")


def test_run_folder_behind_a_link_of_this_user_is_used(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")
    RunFolder(tmp_path / "mine", {"job": "x"}).close()

    assert (tmp_path / "elsewhere" / "run.json").exists()


@cases(
    "name",
    [
        "..", ".", "../x", "x/../../y", "/etc/x", "a/b", ".hidden", "-x", "a\\b", "a\0b", "a\nb", "a\x1b[2Jb", "a b",
        "~root", "$HOME", "a\u2215b", "\uff0e\uff0e", "\u202eabc", "\u0430dmin", "x" * 101, "x" * 300, "é",
        "CON:", "a*", "a;b", "a`b`",
    ],
)  # fmt: skip
def test_invalid_run_name_is_rejected(name):
    with pytest.raises(ConfigError, match="EFFICIENTLLM_RUN_NAME="):
        read_config({"EFFICIENTLLM_RUN_NAME": name})


@needs_root
@pytest.mark.faults
@pytest.mark.faults
def test_run_folder_of_another_user_is_reported(launch, public):
    (public / "runs").mkdir()
    (public / "runs" / "mine").mkdir()
    for path in (public / "runs" / "mine", public / "runs"):
        os.chown(path, OTHER_USER, OTHER_USER)
    job = launch.python("loop.py", run_dir=public / "runs", run_name="mine").done()

    assert len(job.blocks) == 2
    assert job.stdout.count("another user") == 1
    assert list((public / "runs" / "mine").iterdir()) == []


@pytest.mark.faults
def test_pipe_in_the_place_of_a_summary_does_not_block_its_reader(launch, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "mine" / "summary.json")
    job = launch.python("loop.py", run_name="mine").done()

    assert job.ledger.summary.tokens == 2000


# --- file systems that show our files as another user's ---


@pytest.fixture
def shown_as(monkeypatch):
    """Return a function that makes a folder show one owner and one mode for all entries, as SMB can do."""
    real = {"stat": os.stat, "fstat": os.fstat, "lstat": os.lstat}

    def show(folder, user, mode):
        def changed(name):
            def look(where, **options):
                about = real[name](where, **options)
                path = Path(f"/proc/self/fd/{where}").readlink() if isinstance(where, int) else os.fspath(where)
                if not str(path).startswith(str(folder)):
                    return about
                return os.stat_result((stat.S_IFMT(about.st_mode) | mode, *about[1:4], user, user, *about[6:]))

            return look

        for name in real:
            monkeypatch.setattr(os, name, changed(name))

    return show


@pytest.mark.parametrize("user", [0, 65534, OTHER_USER])
def test_file_system_with_one_owner_for_all_files_is_accepted(tmp_path, shown_as, user):
    folder = tmp_path / "share" / "runs"
    own_files.make_folder(folder)
    (folder / "file").write_bytes(b"x")
    shown_as(tmp_path / "share", user, 0o777)

    own_files.make_folder(folder)
    assert own_files.read_file(folder / "file") == b"x"
    assert [path.name for path in folder.iterdir()] == ["file"], "the file made for the check is removed"
