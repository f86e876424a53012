"""Confinement of a candidate program by the kernel. Linux on x86-64 and AArch64.

A program runs in separate mount, process, network, IPC and host-name namespaces (and a user
namespace if not root). The root directory has Python and the system's libraries, read-only, and an
empty memory file system as the working directory. Resource limits and a list of allowed system
calls (`calls.py`) are further bounds.
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
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
# A program's user is UID plus a process id, and no other process has it: limits per user hold.
UID = 0x70000000
_MAX_PID = 1 << 22
_ROOT = "/dev"  # Mount point of the new root, visible to the sandbox alone.


def enter_namespaces(identity: int) -> bool:
  """Leaves the parent's namespaces. The next child is process 1 of a new one.

  Root without the right to unshare (in a container) first becomes the user `identity`, since the
  kernel does not limit the threads of its root. Returns whether this process is still the machine's
  root, which can take another user's identity.

  Raises:
    OSError: the kernel or a container's policy denies it.
  """
  spaces = NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS
  if os.geteuid() == 0 and _has_users():
    with contextlib.suppress(OSError):
      _check(_libc.unshare(spaces), "unshare")
      return True
    with contextlib.suppress(OSError):
      take_identity(identity)
      _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")  # /proc
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
  """Enters a new root in memory, with `mounts` and an empty SCRATCH.

  It ends with the namespace, and leaves nothing on disk.

  Args:
    mounts: from readable paths of the host to paths inside.

  Raises:
    OSError: a mount fails, for example on kernels before 5.12.
  """
  _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
  # Opened first, since the new root hides all files below its mount point.
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
  _check(
    _libc.pivot_root(b".", b"."), "pivot_root"
  )  # The old root is now mounted over the new one.
  _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
  os.chdir("/")
  mount_scratch(scratch_bytes)
  _set_mount("/", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)


def mount_scratch(size: int) -> None:
  """Mounts an empty SCRATCH of at most `size` bytes."""
  options = f"size={size},nr_inodes=4096,mode=1777"
  _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def unmount_scratch() -> None:
  _check(_libc.umount2(SCRATCH.encode(), _MNT_DETACH), f"umount of {SCRATCH}")


def die_with_parent() -> None:
  _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def hide_from_debuggers() -> None:
  """Hides this process's memory and descriptors from other processes of the user."""
  _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def set_limits(limits: dict, tasks: int | None) -> None:
  """Sets `process.Limits` for this process.

  Args:
    tasks: maximum processes and threads of this user; None for no maximum.
  """
  most_of = {
    resource.RLIMIT_CPU: limits["cpu_s"],
    resource.RLIMIT_AS: limits["memory_bytes"],
    resource.RLIMIT_FSIZE: limits["file_bytes"],
    resource.RLIMIT_NOFILE: limits["open_files"],
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    # Solutions rely on deep recursion in C.
    resource.RLIMIT_STACK: min(limits["memory_bytes"] // 4, 1 << 28),
  }
  if tasks is not None:
    most_of[resource.RLIMIT_NPROC] = tasks
  for kind, soft in most_of.items():
    hard = soft + (kind == resource.RLIMIT_CPU)  # SIGXCPU, then SIGKILL a second later.
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def take_identity(uid: int) -> None:
  """Becomes a user without any files. Requires the machine's root."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
  """Gives up every capability for good."""
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
  if result < 0:
    error = ctypes.get_errno()
    raise OSError(error, f"{action}: {os.strerror(error)}")
