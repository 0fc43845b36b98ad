"""Paths that users write name arrays below the roots, and nothing else."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oocgemm.errors import InputError
from oocgemm.service.limits import PathError, Root, allowed_folders, display, resolve
from tests.support.suite import examples

# Links in the tree, in both roots: what each points to. Those of `OUT` lead out of the root.
INSIDE = {"near": "dir", "dir/up": "../A.npy", "chain": "near/up"}
OUT = {
    "absolute": "{base}/secret",
    "same": "{base}/data/A.npy",  # an absolute link is refused, even if it leads back
    "relative": "../secret",
    "back": "../data/A.npy",
    "dir/far": "../../secret/A.npy",
    "hop": "relative",
    "self": "/proc/self/root",
    "cwd": "/proc/self/cwd",
}
ENDLESS = {"loop": "loop", "dangling": "nothing"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the roots `data` and `out`, and a folder `secret` that is no root."""
    base = tmp_path_factory.mktemp("base").resolve()
    for name in ("data", "out", "secret"):
        for folder in ("", "dir", "dir/deep", "A.zarr/c/0"):
            (base / name / folder).mkdir(parents=True, exist_ok=True)
        for file in ("A.npy", "dir/B.npy", "dir/%2e%2e", "A.zarr/c/0/0"):
            (base / name / file).write_text(name)
    for name in ("data", "out"):
        for link, target in (INSIDE | OUT | ENDLESS).items():
            (base / name / link).symlink_to(target.format(base=base))
    return base


@pytest.fixture(scope="module")
def roots(base: Path) -> Mapping[str, Root]:
    return {
        name: Root.parse(f"{name}={base / name}:{mode}") for name, mode in (("data", "ro"), ("out", "rw"))
    }


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("A.npy", "A.npy"),
        ("A.zarr", "A.zarr"),
        ("./dir//B.npy/.", "dir/B.npy"),
        ("near/B.npy", "dir/B.npy"),
        ("dir/up", "A.npy"),
        ("chain", "A.npy"),
        ("dir/%2e%2e", "dir/%2e%2e"),  # the name of a file
    ],
)
def test_paths_in_a_root_are_found(base: Path, roots: Mapping[str, Root], path: str, found: str) -> None:
    assert resolve(roots, f"data:{path}", write=False) == base / "data" / found
    assert resolve(roots, f"out:{path}", write=True) == base / "out" / found
    assert display(roots, base / "data" / found) == f"data:{found}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:../secret/A.npy", "contains '..'"),
        ("data:dir/../../secret/A.npy", "contains '..'"),
        ("data:dir/..", "contains '..'"),
        ("data:/etc/passwd", "the path is absolute"),
        ("data://etc/passwd", "the path is absolute"),
        ("/etc/passwd", "names no root"),
        ("../secret/A.npy", "names no root"),
        ("file:///etc/passwd", "there is no root 'file'"),
        (
            "s3://bucket/A.zarr",
            r"s3://\.\.\.: there is no root 's3', and jobs take no URLs: copy the array into a",
        ),
        ("https://h/A.zarr?sig=secret", r"^https://\.\.\.: there is no root 'https', and jobs take no URLs"),
        ("secret:A.npy", "there is no root 'secret'"),
        ("DATA:A.npy", "there is no root 'DATA'"),
        (":A.npy", "there is no root ''"),
        ("data:A.npy\0.zarr", "contains a NUL character"),
        ("data:\udc2e\udc2e/secret", "not valid Unicode"),
        ("data:\udcff", "not valid Unicode"),
        ("data:", "this is the root itself"),
        ("data:./.", "this is the root itself"),
        ("data:absent.npy", "nothing at this path"),
        ("data:A.npy/x", "a part of it is no folder"),
        ("data:" + "a" * 300, "too long"),
        # Encodings of '..' and '/' are not decoded.
        ("data:%2e%2e/secret/A.npy", "nothing at this path"),
        ("data:..%2fsecret%2fA.npy", "nothing at this path"),
        ("data:%252e%252e/secret/A.npy", "nothing at this path"),
        ("data:..\\secret\\A.npy", "nothing at this path"),
        ("data:\uff0e\uff0e/secret/A.npy", "nothing at this path"),  # full-width dots
        ("data:dir\u2215B.npy", "nothing at this path"),  # a division slash
        *((f"data:{link}", "a symbolic link leaves the root") for link in OUT),
        *((f"data:{link}/A.npy", "a symbolic link leaves the root") for link in ("absolute", "hop")),
        ("data:self/etc/passwd", "a symbolic link leaves the root"),
        ("data:loop", "too many symbolic links"),
        ("data:dangling", "nothing at this path"),
        ("out:dangling", "points to nothing"),
        ("out:dangling/C.npy", "points to nothing"),
        ("out:A.npy/C.npy", "a part of it is no folder"),
        ("out:hop/new/C.npy", "a symbolic link leaves the root"),
        ("out:../C.npy", "contains '..'"),
    ],
)
def test_other_paths_are_refused(roots: Mapping[str, Root], text: str, message: str) -> None:
    with pytest.raises(PathError, match=message) as refused:
        resolve(roots, text, write=text.startswith("out:"))
    assert not isinstance(refused.value.args[0], bytes)
    repr(refused.value).encode()  # it can be sent to the user


def test_a_new_array_needs_a_writable_root(base: Path, roots: Mapping[str, Root]) -> None:
    assert resolve(roots, "out:new/deep/C.zarr", write=True) == base / "out/new/deep/C.zarr"
    assert resolve(roots, "out:near/C.zarr", write=True) == base / "out/dir/C.zarr"
    with pytest.raises(PathError, match=r"root data is read-only: use a writable root \(out\)"):
        resolve(roots, "data:C.zarr", write=True)


def test_magic_links_of_proc_are_refused(roots: Mapping[str, Root]) -> None:
    """In a root that contains /proc, a magic link stays below the root, but can lead anywhere."""
    everything = {"all": Root("all", Path("/"), False)}
    assert resolve(everything, "all:proc/self/status", write=False).name == "status"
    for path in ("proc/self/root/etc/passwd", "proc/self/cwd", "proc/self/fd/0", "proc/self/exe"):
        with pytest.raises(PathError, match="one of /proc"):
            resolve(everything, f"all:{path}", write=False)


def test_neither_pipes_nor_sockets_are_arrays(tmp_path: Path) -> None:
    roots = {"x": Root.parse(f"x={tmp_path}:ro")}
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(tmp_path, os.O_PATH)
        server.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    for name in ("pipe", "socket"):
        with pytest.raises(PathError, match="neither a file nor a folder"):
            resolve(roots, f"x:{name}", write=False)


def test_a_root_that_was_replaced_by_a_link_is_refused(tmp_path: Path) -> None:
    for name in ("root", "secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "A.npy").touch()
    roots = {"x": Root.parse(f"x={tmp_path / 'root'}:ro")}
    (tmp_path / "root").rename(tmp_path / "old")
    (tmp_path / "root").symlink_to("secret")
    with pytest.raises(PathError, match=r"which may have been moved|Not a directory"):
        resolve(roots, "x:A.npy", write=False)


def test_links_to_names_that_are_not_unicode_are_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff")).touch()
    (tmp_path / "link").symlink_to(os.fsdecode(b"\xff"))
    with pytest.raises(PathError, match="not UTF-8"):
        resolve({"x": Root.parse(f"x={tmp_path}:ro")}, "x:link", write=False)


def test_the_deepest_root_is_displayed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    roots = {"all": Root.parse(f"all={tmp_path}:ro"), "out": Root.parse(f"out={tmp_path}/out:rw")}
    path = resolve(roots, "all:out", write=False)
    assert display(roots, path) == "all:out"
    path = resolve(roots, "out:C.npy", write=True)
    assert display(roots, path) == "out:C.npy"
    assert display(roots, "/elsewhere/C.npy") == "/elsewhere/C.npy"
    assert allowed_folders(roots.values()) == {"read": [str(tmp_path)], "write": [str(tmp_path / "out")]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "cannot read 'data' as a root: write NAME=FOLDER:MODE"),
        ("data=/tmp", "write NAME=FOLDER:MODE"),
        ("data=/tmp:rx", "write NAME=FOLDER:MODE"),
        ("data=:ro", "write NAME=FOLDER:MODE"),
        ("a:b=/tmp:ro", "'a:b' cannot be the name of a root"),
        ("=/tmp:ro", "'' cannot be the name"),
        ("data=/nonexistent/folder:ro", "create the folder"),
        (f"data={__file__}:ro", "is no folder"),
    ],
)
def test_wrong_roots_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Root.parse(text)


def test_a_root_may_have_colons_and_links_in_its_path(tmp_path: Path) -> None:
    (tmp_path / "a=b:c").mkdir()
    (tmp_path / "link").symlink_to("a=b:c")
    expected = Root("x", (tmp_path / "a=b:c").resolve(), True)
    assert Root.parse(f"x={tmp_path}/a=b:c:rw") == expected
    assert Root.parse(f"x={tmp_path}/link:rw") == expected


def reference(root: Path, text: str, *, write: bool) -> Path | None:
    """Resolve a path component by component, in Python; None if it is refused."""
    left = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith("/") or ".." in left or not left or "\0" in text:
        return None
    at: list[str] = []
    links = linked = 0  # `linked` of the components that are left come from links
    while left:
        part = left.pop(0)
        from_link, linked = linked > 0, max(0, linked - 1)
        here = root.joinpath(*at)
        if part == "..":
            if not at:
                return None
            at.pop()
        elif (here / part).is_symlink():
            target = os.readlink(here / part)
            links += 1
            if target.startswith("/") or links > 40:
                return None
            left = target.split("/") + left
            linked += len(target.split("/"))
        elif (here / part).exists():
            at.append(part)
        elif write and not from_link and here.is_dir():  # a link that points to nothing is refused
            return here.joinpath(part, *left)
        else:
            return None
    return root.joinpath(*at) if at else None


PARTS = [*INSIDE, *OUT, *ENDLESS, "dir", "deep", "A.npy", "B.npy", "A.zarr", "c", "0", "new", "up", "far"]
WORDS = st.sampled_from(["..", ".", "", "%2e%2e", "secret", "...", *PARTS]) | st.text(max_size=3)


@settings(max_examples=examples(1000, quick=100))
@example(parts=["dir", "loop"], write=True)
@example(parts=["dir", "nothing", "new"], write=True)
@given(parts=st.lists(WORDS, max_size=6), write=st.booleans())
def test_any_path_is_resolved_as_by_the_reference(
    base: Path, roots: Mapping[str, Root], parts: list[str], write: bool
) -> None:
    path = "/".join(parts)
    name = "out" if write else "data"
    try:
        found = resolve(roots, f"{name}:{path}", write=write)
    except PathError:
        found = None
    assert found == reference(base / name, path, write=write)
    if found is not None:
        assert (base / name) in found.resolve().parents
        assert resolve(roots, display(roots, found), write=write) == found
