"""The machine as an agent sees it: an /etc like a fresh container's, a private /tmp, and no users' homes or sockets.

The mounts exist only in the program's mount namespace. Where mounts are refused, the program sees the machine's own
/etc (Landlock allows only the parts that every user may read), and has no /tmp.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from .layers import (
    HOST_NAME,
    MS_BIND_REC,
    MS_NOSUID_NODEV,
    MS_READ_ONLY_BIND,
    is_public,
    keep_mounts_private,
    mount,
    move_root,
    unmount,
)

WRITABLE = ["/tmp", "/var/tmp", "/dev/shm"]
# The parts of the machine's /etc that an agent may read: only those without keys or settings of its users.
_ETC = """alternatives ca-certificates crypto-policies debian_version fonts host.conf ld.so.cache ld.so.conf
    ld.so.conf.d locale.alias localtime magic magic.mime mime.types networks os-release perl pki/ca-trust/extracted
    pki/tls/cert.pem pki/tls/certs pki/tls/openssl.cnf protocols python3 rpc services shells ssl/cert.pem ssl/certs
    ssl/openssl.cnf terminfo timezone"""
# Programs complain if these exist and cannot be read. The view leaves most of them out, as a fresh container does;
# without the view, an agent reads the machine's files.
_OF_MACHINE = "bash.bashrc group hostname hosts inputrc nsswitch.conf passwd profile profile.d resolv.conf tmux.conf"


def readable_etc(has_view: bool) -> list[str]:
    """Returns the paths below /etc that an agent may read: all in the view, otherwise those that all users may read."""
    return ["/etc"] if has_view else [str(path) for path in _present(f"{_ETC} {_OF_MACHINE}")]


def user_name(uid: int) -> str:
    return "agent" if uid else "root"


def show(folder: str, uid: int, readable: Iterable[str], memory_mib: int, *, has_network: bool) -> bool:
    """Mounts the view; returns whether this system allows it.

    Args:
        folder: the agent's own folder, with `home` and `tmp`.
        uid: the agent's user, whose group has the same number.
        readable: other paths that the agent may read.
        memory_mib: bounds the agent's files in /dev/shm.
        has_network: whether the agent resolves host names as this machine does.
    """
    if not keep_mounts_private():
        return False
    os.umask(0o022)  # the agent runs as another user and must be able to read these files; it sets its own umask
    tmp = os.open(f"{folder}/tmp", os.O_PATH)
    own = {path: tmp for path in ("/tmp", "/var/tmp") if Path(path).is_dir()}
    empty = {os.path.realpath(path) for path in ("/run", Path.home()) if Path(path).is_dir()} - {"/"}
    hidden = [*own, *(path for path in empty if not _is_below(path, own))]
    links = {os.path.abspath(path) for path in (folder, *readable)}  # noqa: PTH100
    real = {os.path.realpath(path) for path in links}
    shown: dict[str, int] = {}
    for path in [*sorted(real), *sorted(links - real)]:  # folders before their content, links last
        if _is_below(path, hidden) and path not in (*own, "/run"):  # a script in /tmp does not expose all of /tmp
            with contextlib.suppress(OSError):
                shown[path] = os.open(path, os.O_PATH)
    if not _mount_etc(uid, f"{folder}/home", has_network):
        return False
    for path in hidden:
        if path in own:
            _bind(tmp, path)
        else:
            _mount_memory(path, "size=1m,mode=755")
    _mount_memory("/dev/shm", f"size={memory_mib}m,mode=1777")
    for path, descriptor in shown.items():
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if not (Path(path).exists() and os.path.samestat(Path(path).stat(), os.fstat(descriptor))):
            (Path(path) if is_folder else Path(path).parent).mkdir(parents=True, exist_ok=True)
            if not is_folder:
                Path(path).touch()
            _bind(descriptor, path)
            if not _is_below(folder, [path]):
                mount("", path, None, MS_READ_ONLY_BIND, "")  # if it fails, Landlock and permissions apply
    for descriptor in (tmp, *shown.values()):
        os.close(descriptor)
    return True


def change_root(folder: str, names: Iterable[str]) -> None:
    """Switches to a new root, with this machine's top-level folders and these folders of the agent's `work`."""
    root = Path(folder, "root")
    root.mkdir()
    _mount_memory(str(root), "size=1m,mode=755")
    for entry in [*Path("/").iterdir(), *(Path(folder, "work", name) for name in names)]:
        target = root / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            target.mkdir()
            if not mount(str(entry), str(target), None, MS_BIND_REC, ""):
                raise OSError(f"mounting {target} in the agent's namespace was refused")
    move_root(str(root))
    if not unmount(str(root)):  # a second copy, mounted with the folder above it
        raise OSError("the copy of an agent's root cannot be unmounted")
    root.rmdir()


def _mount_etc(uid: int, home: str, has_network: bool) -> bool:
    """Mounts an /etc with the public parts of the machine's /etc and the agent's user; returns whether that works."""
    present = _present(_ETC)
    links = {path: str(path.readlink()) for path in present if _leads_to_system(path)}
    folders = {path: os.open(path, os.O_PATH) for path in present if path.is_dir() and path not in links}
    files = {path: path.read_bytes() for path in present if path.is_file() and path not in links}
    users = {0: ("root", "/root"), 65534: ("nobody", "/"), uid: (user_name(uid), home.replace(":", ""))}
    hosts = f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {HOST_NAME}\n"
    texts = {
        "passwd": "".join(
            f"{name}:x:{number}:{number}:{name}:{at}:/bin/bash\n" for number, (name, at) in users.items()
        ),
        "group": "".join(f"{name}:x:{number}:\n" for number, (name, _) in users.items()),
        "hostname": f"{HOST_NAME}\n",
        "hosts": hosts,
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    if has_network:
        texts["hosts"] += Path("/etc/hosts").read_text()
        with contextlib.suppress(OSError):
            texts["resolv.conf"] = Path("/etc/resolv.conf").read_text()
    try:
        _mount_memory("/etc", "size=16m,mode=755")
    except OSError:
        return False
    for path in present:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in links:
            path.symlink_to(links[path])
        elif path in files:
            path.write_bytes(files[path])
        else:
            path.mkdir()
            _bind(folders[path], str(path))
            os.close(folders[path])
    Path("/etc/mtab").symlink_to("/proc/self/mounts")
    for name, text in texts.items():
        Path("/etc", name).write_text(text)
    mount("", "/etc", None, MS_READ_ONLY_BIND, "")
    return True


def _present(names: str) -> list[Path]:
    """Returns these paths in /etc, and the settings of Java and Python, if every user may read them."""
    paths = [Path("/etc", name) for name in names.split()]
    paths += sorted([*Path("/etc").glob("java-*"), *Path("/etc").glob("python3.*")])
    return [path for path in paths if path.exists() and is_public(str(path)) and path.stat().st_mode & 0o004]


def _leads_to_system(path: Path) -> bool:
    return path.is_symlink() and os.path.normpath(path.parent / path.readlink()).startswith("/usr/")


def _is_below(path: str, tops: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{top}/") for top in tops)


def _mount_memory(path: str, options: str) -> None:
    if not mount("tmpfs", path, "tmpfs", MS_NOSUID_NODEV, options):
        raise OSError(f"mounting a private {path} in the agent's namespace was refused")


def _bind(descriptor: int, path: str) -> None:
    if not mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND_REC, ""):
        raise OSError(f"mounting {path} in the agent's namespace was refused")
