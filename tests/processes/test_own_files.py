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
from effllm.store.run_lock import Holder, status_of, take_lock

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners of files")
OTHER_USER = 12345


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.faults
def test_job_leaves_no_file_that_other_users_can_read(launch, tmp_path):
    before = os.umask(0o000)
    try:
        job = launch.python("loop.py", run_dir=tmp_path / "new" / "runs", run_name="mine").done()
    finally:
        os.umask(before)

    folder = tmp_path / "new" / "runs" / "mine"
    assert job.blocks
    assert mode(folder) == mode(folder.parent) == mode(folder.parent.parent) == 0o700
    left = {path: mode(path) for path in folder.rglob("*")}
    assert len(left) >= 6
    assert [path for path, bits in left.items() if bits & 0o077] == []


def placed(kind, path):
    """Put something else in the place of a file of this user; return a function that fails if a file was changed."""
    precious = path.parent / "precious"
    precious.write_text("precious\n")
    make = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(precious),
        "link to nothing": lambda: path.symlink_to(path.parent / "not there"),
        "second name": lambda: os.link(precious, path),
        "folder": path.mkdir,
        "device": lambda: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3)),
        "file of another user": lambda: (path.write_text(""), os.chown(path, OTHER_USER, OTHER_USER)),
    }
    make[kind]()

    def check():
        assert precious.read_text() == "precious\n"
        assert not (path.parent / "not there").exists()

    return check


LINKS, BY_ROOT = ("pipe", "link", "second name"), ("device", "file of another user")
KINDS = [*LINKS, "link to nothing", "folder"]
KINDS += [pytest.param(kind, marks=[needs_root, pytest.mark.faults]) for kind in BY_ROOT]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_APPEND])
def test_only_regular_files_of_this_user_are_opened(tmp_path, kind, flags):
    check = placed(kind, tmp_path / "file")

    with pytest.raises(OSError):
        own_files.open_file(tmp_path / "file", flags)
    check()


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", ["events.jsonl", "windows-0001.jsonl", "ranks-0001.jsonl", "run.json", "lock"])
def test_run_folder_does_not_write_through_pipes_and_links(tmp_path, kind, name):
    check = placed(kind, tmp_path / name)

    with pytest.raises(OSError, match=r"not a regular file of this user|Too many levels"):
        take_lock(tmp_path, Holder(), wait_s=0.0) if name == "lock" else RunFolder(tmp_path, {})
    check()


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["summary.json", "state.json"])
def test_pipe_or_link_instead_of_a_replaced_file_is_not_written_to(tmp_path, kind, name):
    check = placed(kind, tmp_path / name)

    store = RunFolder(tmp_path, {})
    store.save_state(b"{}")
    assert status_of(tmp_path) == ""
    store.close()
    check()


@needs_root
@pytest.mark.faults
def test_folder_of_another_user_is_rejected_with_the_reason(tmp_path):
    folder_of_another(tmp_path / "theirs", 0o755)

    with pytest.raises(PermissionError, match="the folder belongs to another user"):
        own_files.make_folder(tmp_path / "theirs")
    with pytest.raises(StoreUnavailable, match="the folder belongs to another user; set EFFICIENTLLM_RUN_DIR"):
        open_run_folder(tmp_path / "theirs", {})


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
@pytest.mark.parametrize("target", [None, "ours", "elsewhere"])
def test_link_or_folder_of_another_user_in_tmp_is_rejected(public, tmp_path, target):
    (tmp_path / "ours").mkdir()
    if target:
        link_of_another(public / "runs", tmp_path / target)
    else:
        folder_of_another(public / "runs", 0o755)

    with pytest.raises(PermissionError, match="runs belongs to another user"):
        own_files.make_folder(public / "runs" / "mine")


# --- folders of a group, as in projects ---


PRECIOUS = dict.fromkeys(("summary.json", "state.json", "run.json", "lock"), "precious")


@pytest.fixture
def project(tmp_path):
    """Return a folder with mode 2770; a folder with files of a run is next to it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project").chmod(0o2770)
    (tmp_path / "precious" / "mine").mkdir(parents=True)
    for name, text in PRECIOUS.items():
        (tmp_path / "precious" / "mine" / name).write_text(text)
    return tmp_path / "project"


def is_untouched(precious):
    """Whether the folder has the files of `project`, and no other."""
    files = {path.name: path.read_text() for path in (precious / "mine").iterdir()}
    return ([path.name for path in precious.iterdir()], files) == (["mine"], PRECIOUS)


def link_of_another(path, target):
    path.symlink_to(target)
    os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)


def folder_of_another(path, mode):
    path.mkdir()
    os.chown(path, OTHER_USER, OTHER_USER)
    path.chmod(mode)


def test_run_folder_in_a_folder_of_a_group_is_private(project):
    own_files.make_folder(project / "runs" / "mine")

    assert {mode(path) & 0o777 for path in (project / "runs", project / "runs" / "mine")} == {0o700}


@pytest.mark.parametrize(
    ("bits", "message"),
    [(0o777, "everybody can write to the folder: chmod o-w"), (0o2770, "its group can write to the folder: chmod g-w")],
)
def test_run_folder_that_others_can_write_to_is_rejected(project, bits, message):
    (project / "mine").mkdir()
    (project / "mine").chmod(bits)

    with pytest.raises(PermissionError, match=message):
        own_files.make_folder(project / "mine")


@needs_root
def test_folder_of_a_group_member_on_the_path_is_accepted(project):
    folder_of_another(project / "experiments", 0o2770)
    own_files.make_folder(project / "experiments" / "runs" / "mine")

    folder_of_another(project / "open", 0o2777)
    with pytest.raises(PermissionError, match="open belongs to another user"):
        own_files.make_folder(project / "open" / "mine")


@needs_root
@pytest.mark.parametrize("way", ["runs", "experiments/runs", "own/runs"])
def test_link_of_another_user_in_a_folder_of_a_group_is_rejected(project, way):
    if way == "experiments/runs":  # folder of another user that the group cannot write to
        folder_of_another(project / "experiments", 0o755)
    elif way == "own/runs":  # link of this user to a link of another user
        (project / "own").symlink_to(project / "links")
        (project / "links").mkdir()
        (project / "links").chmod(0o2770)
    link_of_another(project / way, project.parent / "precious")

    for use in (
        lambda: own_files.make_folder(project / way / "mine"),
        lambda: own_files.make_folder(project / way / "new" / "folder"),
        lambda: take_lock(project / way / "mine", Holder(), wait_s=0.0),
    ):
        with pytest.raises(PermissionError, match="runs belongs to another user"):
            use()
    assert is_untouched(project.parent / "precious")


@pytest.mark.parametrize("run", ["runs/mine", "runs"])
def test_link_of_this_user_in_a_folder_of_a_group_is_followed(project, run):
    (project.parent / "scratch").mkdir()
    (project / "runs").symlink_to(project.parent / "scratch")
    RunFolder(project / run, {"job": "x"}).close()

    assert (project.parent / run.replace("runs", "scratch") / "run.json").exists()


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


@needs_root
@pytest.mark.faults
def test_run_folder_of_another_user_is_reported(launch, public):
    for path in (public / "runs", public / "runs" / "mine"):
        folder_of_another(path, 0o755)
    job = launch.python("loop.py", run_dir=public / "runs", run_name="mine").done()

    assert len(job.blocks) == 2
    assert job.stdout.count("another user") == 1
    assert list((public / "runs" / "mine").iterdir()) == []


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
