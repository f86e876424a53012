"""Confines a candidate program by means of the Linux kernel, on x86-64 and AArch64.

A program runs in separate mount, process, network, IPC and host-name namespaces. If the trainer
lacks the right to create these namespaces, they are created within a user namespace. The root
directory has Python, NumPy and the system's libraries, read-only. The working directory is an empty
file system in memory. Resource limits and a list of allowed system calls (`calls.py`) confine the
program further. With isolation "none", only the resource limits apply, and threads are unlimited.
"""

import contextlib
import ctypes
import os
import resource
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

NEW_USER, NEW_NS, NEW_PID, NEW_NET, NEW_IPC, NEW_UTS = (
  0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000,
)  # fmt: skip
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 1 << 18, 2, 4
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE = 1, 2, 4, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

SCRATCH = "/scratch"  # Working directory of programs; /tmp is a link to it.
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")  # Readable in a sandbox.
# If the trainer is root, a program's user id is UID plus a process id. No other process has this
# user id, so the kernel's limits per user count the program alone.
UID = 0x70000000
_MAX_PID = 1 << 22
_ROOT = "/dev"  # Mount point of the new root, visible to the sandbox alone.


def enter_namespaces(identity: int) -> bool:
  """Moves this process to new namespaces; its next child is process 1 there.

  If this process lacks the right to create namespaces, it enters a user namespace, too. Root may
  lack this right in a container. A process of root then first becomes the user `identity`, since
  the kernel does not limit the threads of root.

  Returns whether this process is still the machine's root user. If so, each program later runs as
  another user.

  Raises:
    OSError: the kernel or a container's policy denies a step.
  """
  spaces = NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS
  if os.geteuid() == 0 and _has_users():
    with contextlib.suppress(OSError):
      _check(_libc.unshare(spaces), "unshare")
      return True
    with contextlib.suppress(OSError):
      take_identity(identity)
      # Files of /proc/self belong to the new user only with this flag.
      _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
  uid, gid = os.geteuid(), os.getegid()
  _check(_libc.unshare(spaces | NEW_USER), "unshare with a user namespace")
  for name, line in (
    ("setgroups", "deny"),
    ("uid_map", f"{uid} {uid} 1"),
    ("gid_map", f"{gid} {gid} 1"),
  ):
    with open(f"/proc/self/{name}", "w") as file:
      file.write(line)
  return False


def _has_users() -> bool:
  """Whether user ids from UID on exist. In a container they may not."""
  with open("/proc/self/uid_map") as file:
    ranges = [list(map(int, line.split())) for line in file]
  return any(first <= UID and first + count >= UID + _MAX_PID for first, _, count in ranges)


def enter_root(mounts: dict[str, str], scratch_bytes: int) -> None:
  """Changes the root directory to a new file system in memory.

  The new root has the mounted paths, read-only, and an empty SCRATCH. It vanishes with the
  namespace.

  Args:
    mounts: a dict from readable paths of the host to paths inside.
    scratch_bytes: maximum size of all files in SCRATCH.

  Raises:
    OSError: a mount fails, for example on kernels before 5.12.
  """
  _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
  # All paths are opened first, since the new root will hide the files below its mount point.
  mounts = mounts | {path: path for path in DEVICES}
  sources = {target: os.open(path, os.O_PATH) for path, target in mounts.items()}
  links = {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}
  _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
  for path, descriptor in sources.items():
    target = f"{_ROOT}{path}"
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
      os.makedirs(target, exist_ok=True)
    else:
      os.makedirs(os.path.dirname(target), exist_ok=True)
      with open(target, "w"):
        pass
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if path not in DEVICES:
      _set_mount(target, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, _AT_RECURSIVE)
    os.close(descriptor)
  for path, content in links.items():
    os.symlink(content, _ROOT + path)
  os.mkdir(_ROOT + SCRATCH)
  os.symlink(SCRATCH, _ROOT + "/tmp")
  os.chdir(_ROOT)
  # Mounts the old root over the new one, to be unmounted at once.
  _check(_libc.pivot_root(b".", b"."), "pivot_root")
  _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
  os.chdir("/")
  mount_scratch(scratch_bytes)
  _set_mount("/", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)


def mount_scratch(size: int) -> None:
  """Mounts an empty file system of at most `size` bytes at SCRATCH."""
  options = f"size={size},nr_inodes=4096,mode=1777"
  _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def unmount_scratch() -> None:
  """Unmounts SCRATCH, and thereby deletes its files."""
  _check(_libc.umount2(SCRATCH.encode(), _MNT_DETACH), f"umount of {SCRATCH}")


def die_with_parent() -> None:
  """Lets the kernel kill this process when its parent ends."""
  _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def hide_from_debuggers() -> None:
  """Hides this process's memory and descriptors from other processes of its user."""
  _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def set_limits(limits: dict, tasks: int | None) -> None:
  """Sets resource limits of this process.

  Args:
    limits: a dict of the fields of `process.Limits`.
    tasks: maximum number of processes and threads of this user; None for no maximum.
  """
  most_of = {
    resource.RLIMIT_CPU: limits["cpu_s"],
    resource.RLIMIT_AS: limits["memory_bytes"],
    resource.RLIMIT_FSIZE: limits["file_bytes"],
    resource.RLIMIT_NOFILE: limits["open_files"],
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    # Programs rely on deep recursion.
    resource.RLIMIT_STACK: min(limits["memory_bytes"] // 4, 1 << 28),
  }
  if tasks is not None:
    most_of[resource.RLIMIT_NPROC] = tasks
  for kind, soft in most_of.items():
    # At the soft limit of CPU time the kernel sends SIGXCPU, at the hard one SIGKILL.
    hard = soft + (kind == resource.RLIMIT_CPU)
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def take_identity(uid: int) -> None:
  """Becomes another user, who owns no files. Only the machine's root can do this."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
  """Gives up all capabilities of the process, for good."""
  _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
  header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
  _check(_libc.capset(header, data), "capset")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
  arguments = (text.encode() if text else None for text in (source, target, kind))
  _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()), f"mount at {target}")


def _set_mount(target: str, attributes: int, flags: int) -> None:
  long, settings = ctypes.c_long, struct.pack("QQQQ", attributes, 0, 0, 0)
  path, size = target.encode(), long(len(settings))
  result = _libc.syscall(long(442), long(-100), path, long(flags), settings, size)
  _check(result, "mount_setattr")


def _check(result: int, action: str) -> None:
  """Raises OSError for a failed system call."""
  if result < 0:
    error = ctypes.get_errno()
    raise OSError(error, f"{action}: {os.strerror(error)}")
