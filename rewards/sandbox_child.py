"""The inside of the sandbox: locks itself in, then becomes the program. Run as a script in a fresh interpreter, standard library only.

Its standard input is one JSON object (see `Sandbox.run`); the file descriptor named by its argument takes ``ready`` once everything is
locked, or why it could not be. It gives itself new user, mount, process, network, IPC and host-name namespaces. In there are: the
interpreter and the system's libraries, read-only; an empty /tmp of limited size; four devices; no network, not even a loopback that is
up; no process but the program's own. When its first process ends, the kernel kills the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
from typing import Any, NoReturn

INSIDE = 1000
STRANGERS = 0x70000000
ROOTS = ("/mnt", "/media", "/srv", "/opt")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 38, 24
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


class Locked(Exception):
    """Something that the sandbox needs was refused."""


def check(result: int, what: str) -> None:
    if result == -1:
        raise Locked(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def encode(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    check(libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)), f"mounting {target}")


class MountAttributes(ctypes.Structure):
    _fields_ = [("set", ctypes.c_uint64), ("clear", ctypes.c_uint64), ("propagation", ctypes.c_uint64), ("userns", ctypes.c_uint64)]


def make_read_only(path: str) -> None:
    """With everything mounted below it."""
    attributes = MountAttributes(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), AT_RECURSIVE, ctypes.byref(attributes), size)
    check(result, f"making {path} read-only")


def die_with_parent(parent: int) -> None:
    check(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def map_users(inner: int, as_root: bool) -> None:
    """Who the sandbox's users are outside: as root its builder is root and its program a user that nobody else is; else it is just us."""
    stranger = STRANGERS + inner
    for name, own in (("uid_map", os.getuid()), ("gid_map", os.getgid())):
        text = f"0 0 1\n{INSIDE} {stranger} 1\n" if as_root else f"{INSIDE} {own} 1\n"
        if name == "gid_map":
            with open(f"/proc/{inner}/setgroups", "w") as file:
                file.write("deny")
        with open(f"/proc/{inner}/{name}", "w") as file:
            file.write(text)


def forbid_namespaces() -> None:
    """No further namespaces in here: they open parts of the kernel that unprivileged code has no business with.

    A second line of defence only, so it is no reason to refuse where /proc/sys cannot be written.
    """
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        with contextlib.suppress(OSError), open(f"/proc/sys/user/max_{kind}_namespaces", "w") as file:
            file.write("0")


def build_root(interpreter_paths: list[str], tmp_bytes: int) -> None:
    root = next((path for path in ROOTS if os.path.isdir(path) and not any(_within(p, path) for p in interpreter_paths)), None)
    if root is None:
        raise Locked(f"none of {', '.join(ROOTS)} is there to mount on")
    for path in interpreter_paths:
        if _within(path, "/tmp") or _within(path, "/dev"):
            raise Locked(f"the Python interpreter lies in {path}, which the sandbox has to cover")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in dict.fromkeys((*SYSTEM, *interpreter_paths)):
        if os.path.islink(path):
            _inside_folder(root, path)
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not any(other != path and _within(path, other) for other in (*SYSTEM, *interpreter_paths)):
            _inside_folder(root, path)
            os.mkdir(root + path) if os.path.isdir(path) else _touch(root + path)
            mount(path, root + path, None, MS_BIND | MS_REC)
            make_read_only(root + path)
    os.mkdir(f"{root}/dev")
    for path in DEVICES:
        _touch(root + path)
        mount(path, root + path, None, MS_BIND)
    os.mkdir(f"{root}/tmp")
    owned = f"mode=700,uid={INSIDE},gid={INSIDE}"
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={tmp_bytes},nr_inodes=1024,{owned}")
    mount("none", root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(root)
    number = PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise Locked(f"the sandbox does not know the processor {platform.machine()}")
    check(libc.syscall(number, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "leaving the old root")
    os.chdir("/tmp")


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _inside_folder(root: str, path: str) -> None:
    os.makedirs(os.path.dirname(root + path), exist_ok=True)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))


def limit(limits: dict[str, int]) -> None:
    cpu = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # the lower one sends SIGXCPU, which tells it from other ends
    for name, value in (
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NPROC", limits["processes"]),
        ("NOFILE", 64),
        ("CORE", 0),
        ("MSGQUEUE", 0),
        ("MEMLOCK", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_privileges() -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # unknown numbers are refused, which is fine
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if os.getuid() != INSIDE:
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    check(libc.capset(header, data), "dropping capabilities")


def become_program(job: dict[str, Any], status: int) -> NoReturn:
    """Last step: limits, input, and exec. The status pipe closes itself on exec."""
    os.setsid()
    drop_privileges()
    for name, text in job["files"].items():
        with open(os.path.join("/tmp", name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    standard_input = os.memfd_create("input")
    with open(standard_input, "wb", closefd=False) as stream:
        stream.write(job["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(standard_input, 0, os.SEEK_SET)
    os.dup2(standard_input, 0)
    os.closerange(3, status)
    os.closerange(status + 1, 4096)
    limit(job["limits"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    os.write(status, b"ready")
    os.execve(job["command"][0], job["command"], environment)


def main(status: int) -> int:
    """Three generations: one outside, that maps users; its child, that makes the namespaces; that one's child, their first process. The
    program is the fourth. Each ends with its parent and hands on the exit code."""
    os.set_inheritable(status, False)
    try:
        parent = os.getppid()
        job = json.load(sys.stdin)
        die_with_parent(parent)
        as_root = os.geteuid() == 0
        unshared, mapped = os.pipe(), os.pipe()
        outside = os.getpid()
        inner = os.fork()
        if inner:
            os.close(unshared[1])
            if os.read(unshared[0], 1):
                map_users(inner, as_root)
                os.write(mapped[1], b"m")
            os.close(status)
            return exit_code(os.waitpid(inner, 0)[1])
        os.close(mapped[1])
        die_with_parent(outside)
        if as_root:
            os.setgroups([])
        check(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP), "new namespaces (unshare)")
        os.write(unshared[1], b"u")
        if not os.read(mapped[0], 1):
            return 1
        die_with_parent(outside)  # the new user namespace may have cleared it
        first = os.fork()
        if first:
            os.close(status)
            return exit_code(os.waitpid(first, 0)[1])
        check(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "PR_SET_PDEATHSIG")
        forbid_namespaces()
        build_root(job["interpreter_paths"], job["limits"]["file_bytes"])
        program = os.fork()
        if program:
            os.close(status)
            return exit_code(os.waitpid(program, 0)[1])
        become_program(job, status)
    except (Locked, OSError, ValueError, KeyError) as error:
        os.write(status, f"{type(error).__name__}: {error}".encode(errors="replace"))
        return 1


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
