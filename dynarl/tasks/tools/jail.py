"""Runs one Python program, read from standard input, where it can do little harm. Started by `sandbox.py` as a file.

    launcher (this file)   new namespaces; a root directory with Python's own files, read-only, and an empty /tmp
      +- program           process 1 of its process namespace: when it ends, the kernel ends all that it started

The launcher lives in the caller's process group and dies with the caller, the program dies with the launcher. Whoever
kills the launcher therefore leaves nothing behind, however many processes the program has made.

Standard library only, and few of its modules: every call starts this anew.
"""

import ctypes
import json
import os
import resource
import signal
import sys

# From <linux/sched.h>, <linux/mount.h> and <linux/prctl.h>.
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
# Of the launcher: the program was not run at all.
REFUSED = 125
# User ids that no account has. A program started by root gets one of its own: processes are counted by user.
FIRST_UID = 0x60000000
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The system does not permit this; the text says what."""


def call(what, result):
    if result != 0:
        number = ctypes.get_errno()
        raise Refused(f"{what}: {os.strerror(number)}")


def mount(source, target, kind, flags, data=None):
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    call(f"mount {target}", libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()))


def isolate(prefix, limits):
    """Into namespaces of its own, with nothing to see of the file system but Python, and no user's rights."""
    user, group, root = os.getuid(), os.getgid(), os.geteuid() == 0
    call("unshare", libc.unshare(NEWNS | NEWIPC | NEWPID | NEWNET | (0 if root else NEWUSER)))
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    base = "/proc"  # is there, and holds no file that Python needs; in this namespace alone it is another directory now
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, f"size={limits['file_bytes']},nr_inodes=4096,mode=755")
    for path in dict.fromkeys((*SYSTEM, prefix)):
        show(path, base)
    os.mkdir(f"{base}/tmp")
    os.chmod(f"{base}/tmp", 0o777)
    os.chroot(base)
    os.chdir("/tmp")
    if root:
        user = FIRST_UID + os.getpid()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def show(path, base):
    """Make a directory of the system visible below `base`, read-only."""
    target = base + path
    if os.path.exists(target):  # inside one that is there already
        return
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.makedirs(target)
        mount(path, target, None, MS_BIND)
        held = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # may not be taken off by a user
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | held | MS_NOSUID | MS_NODEV)


def limit(limits):
    def both(name, value):
        resource.setrlimit(name, (value, value))

    both(resource.RLIMIT_CORE, 0)
    both(resource.RLIMIT_AS, limits["memory_bytes"])
    both(resource.RLIMIT_CPU, limits["cpu_s"])
    both(resource.RLIMIT_FSIZE, limits["file_bytes"])
    both(resource.RLIMIT_NOFILE, 32)
    both(resource.RLIMIT_NPROC, limits["processes"])


def main():
    settings = json.loads(sys.argv[1])
    if settings["confined"]:
        try:
            isolate(settings["prefix"], settings)
        except (Refused, OSError) as error:
            print(error, file=sys.stderr)
            sys.exit(REFUSED)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # here, for a change of user or rights takes it off
    if os.getppid() != settings["parent"]:
        sys.exit(REFUSED)
    alive, held = os.pipe()  # in a process namespace of its own the program cannot see whether its parent is there
    os.set_blocking(alive, False)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(held)
    try:
        os.read(alive, 1)
        os._exit(REFUSED)  # the end of the pipe: the launcher was killed before the line above
    except BlockingIOError:
        pass
    limit(settings)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execve(settings["python"], ["python", "-I", "-S", "-B", "-X", "utf8", "-"], {})


if __name__ == "__main__":
    main()
