"""Confinement of a candidate program by the kernel. Linux on x86-64 and AArch64.

Two ways to be cut off from the machine, both with the same system-call filter and resource limits:

  namespaces  an own mount, process, network, IPC and host-name namespace (and a user namespace if
              not root). The root directory holds Python and the system's libraries, read-only, and
              an empty memory file system that is the working directory.
  seccomp     where namespaces are denied, as in most containers: Landlock confines files to the
              same directories; the filter alone denies network, processes and signals.

Both deny sockets, ptrace, signals to other processes, new namespaces, mounts, io_uring, BPF, shared
memory, and the starting of processes.
"""

import contextlib
import ctypes
import os
import platform
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
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

SCRATCH = "/scratch"  # where programs work; not /tmp, below which Python itself may be installed
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
UID = 0x70000000  # plus a process id: users that exist nowhere else, so that limits per user hold

# System calls by number: (x86-64, AArch64); None where the architecture has no such call.
_DENIED = dict(
  socket=(41, 198), io_uring_setup=(425, 425), ptrace=(101, 117), kill=(62, 129), tkill=(200, 130),
  tgkill=(234, 131), rt_sigqueueinfo=(129, 138), rt_tgsigqueueinfo=(297, 240),
  pidfd_send_signal=(424, 424), pidfd_getfd=(438, 438), process_vm_readv=(310, 270),
  process_vm_writev=(311, 271), unshare=(272, 97), setns=(308, 268), mount=(165, 40),
  umount2=(166, 39), pivot_root=(155, 41), chroot=(161, 51), open_tree=(428, 428),
  move_mount=(429, 429), fsopen=(430, 430), fsconfig=(431, 431), fsmount=(432, 432),
  fspick=(433, 433), mount_setattr=(442, 442), bpf=(321, 280), perf_event_open=(298, 241),
  keyctl=(250, 219), add_key=(248, 217), request_key=(249, 218), userfaultfd=(323, 282),
  memfd_create=(319, 279), memfd_secret=(447, 447), shmget=(29, 194), msgget=(68, 186),
  semget=(64, 190), mq_open=(240, 180), setsid=(112, 157), setpgid=(109, 154),
  init_module=(175, 105), finit_module=(313, 273), kexec_load=(246, 104), reboot=(169, 142),
  # Ways to disturb another process of the same user.
  setpriority=(141, 140), ioprio_set=(251, 30), sched_setparam=(142, 118), kcmp=(312, 272),
  sched_setscheduler=(144, 119), sched_setaffinity=(203, 122), sched_setattr=(314, 274),
  migrate_pages=(256, 238), move_pages=(279, 239), process_madvise=(440, 440),
  process_mrelease=(448, 448),
  # Landlock knows nothing of attributes, and of truncation only since Linux 6.2.
  truncate=(76, 45), chmod=(90, None), fchmod=(91, 52), fchmodat=(268, 53), fchmodat2=(452, 452),
  chown=(92, None), fchown=(93, 55), lchown=(94, None), fchownat=(260, 54), utime=(132, None),
  utimes=(235, None), futimesat=(261, None), utimensat=(280, 88), setxattr=(188, 5),
  lsetxattr=(189, 6), fsetxattr=(190, 7), setxattrat=(463, 463),
  fork=(57, None), vfork=(58, None), execve=(59, 221), execveat=(322, 281),  # and clone, below
)  # fmt: skip
# Calls that are denied for some values of one argument: numbers, which argument, the values.
# F_SETOWN, F_SETSIG, F_SETOWN_EX have the kernel send a signal of one's choice to anybody, and so
# have FIOSETOWN and SIOCSPGRP; TIOCSTI and TIOCLINUX type into a terminal.
_DENIED_VALUES = (
  ((72, 25), 1, (8, 10, 15)),  # fcntl
  ((16, 29), 1, (0x8901, 0x8902, 0x5412, 0x541C)),  # ioctl
  ((157, 167), 0, (1,)),  # prctl(PR_SET_PDEATHSIG), which would undo `die_with_parent`
)
_PRLIMIT = (302, 261)  # allowed for process 0, which is the caller
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x00010000
_EPERM, _ENOSYS = 1, 38


def enter_namespaces() -> bool:
  """Leaves the parent's namespaces; the next child is process 1 of its own.

  Returns whether this process is still the machine's root, which can take another user's identity.

  Raises:
    OSError: if the kernel or a container's policy denies it.
  """
  spaces = NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS
  if os.geteuid() == 0:
    with contextlib.suppress(OSError):
      _check(_libc.unshare(spaces), "unshare")
      return True
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


def enter_root(directory: str, readable: list[str], scratch_bytes: int) -> None:
  """Makes `directory` a root that holds the `readable` paths and an empty SCRATCH, and goes there.

  Raises:
    OSError: if something cannot be mounted (kernels before 5.12, for one).
  """
  _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
  # Opened first: the new root hides whatever lies below `directory`.
  sources = {path: os.open(path, os.O_PATH) for path in (*readable, *DEVICES)}
  links = {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}
  _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
  for path, descriptor in sources.items():
    target = directory + path
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
    os.symlink(content, directory + path)
  os.mkdir(directory + SCRATCH)
  if not os.path.exists(directory + "/tmp"):
    os.symlink(SCRATCH, directory + "/tmp")
  os.chdir(directory)
  _check(_libc.pivot_root(b".", b"."), "pivot_root")  # the old root now lies over the new one
  _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
  os.chdir("/")
  mount_scratch(scratch_bytes)
  _set_mount("/", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)


def mount_scratch(size: int) -> None:
  """An empty SCRATCH of at most `size` bytes."""
  options = f"size={size},nr_inodes=4096,mode=1777"
  _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def unmount_scratch() -> None:
  _check(_libc.umount2(SCRATCH.encode(), _MNT_DETACH), f"umount of {SCRATCH}")


def die_with_parent() -> None:
  _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def hide_from_debuggers() -> None:
  """Processes of the same user can then read neither this one's memory nor its descriptors."""
  _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def set_limits(limits: dict, tasks: int | None) -> None:
  """Sets `process.Limits` for this process; `tasks` counts processes and threads of this user."""
  most_of = {
    resource.RLIMIT_CPU: limits["cpu_s"],
    resource.RLIMIT_AS: limits["memory_bytes"],
    resource.RLIMIT_FSIZE: limits["file_bytes"],
    resource.RLIMIT_NOFILE: limits["open_files"],
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    # Deep recursion in C, which solutions do rely on.
    resource.RLIMIT_STACK: min(limits["memory_bytes"] // 4, 1 << 28),
  }
  if tasks is not None:
    most_of[resource.RLIMIT_NPROC] = tasks
  for kind, soft in most_of.items():
    hard = soft + (kind == resource.RLIMIT_CPU)  # SIGXCPU, and SIGKILL for who catches that
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def take_identity(uid: int) -> None:
  """Becomes a user that owns nothing. For the machine's root only."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
  """Gives up every capability for good."""
  _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
  header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
  _check(_libc.capset(header, data), "capset")


def restrict_files(readable: list[str], writable: str) -> None:
  """Landlock: files below `readable` can be read, below `writable` anything, and nothing else.

  Raises:
    OSError: where the kernel has no Landlock (before 5.13, or not enabled).
  """
  read, every = 1 << 0 | 1 << 2 | 1 << 3, (1 << 13) - 1  # execute, read file, read directory
  attribute = struct.pack("Q", every)
  ruleset = _syscall("landlock_create_ruleset", 444, attribute, len(attribute), 0)
  rules = [(path, read) for path in readable] + [(path, 1 << 1 | 1 << 2) for path in DEVICES]
  for path, access in [*rules, (writable, every)]:
    descriptor = os.open(path, os.O_PATH)
    if not os.path.isdir(path):
      access &= 1 << 0 | 1 << 1 | 1 << 2  # rights of files
    rule = struct.pack("=Qi", access, descriptor)
    _syscall("landlock_add_rule", 445, ruleset, 1, rule, 0)
    os.close(descriptor)
  _syscall("landlock_restrict_self", 446, ruleset, 0)
  os.close(ruleset)


def filter_calls() -> None:
  """Denies the system calls above, and `clone` of anything but threads.

  Raises:
    OSError: on another architecture, or where the kernel has no seccomp filters.
  """
  try:
    column, architecture = _ARCHITECTURES[platform.machine()]
  except KeyError:
    raise OSError(f"no system-call filter for {platform.machine()!r}") from None
  load, equal, at_least, any_bit, back = 0x20, 0x15, 0x35, 0x45, 0x06
  allow, refuse = 0x7FFF0000, 0x00050000  # plus an error number
  program = [
    (load, 0, 0, 4),
    (equal, 1, 0, architecture),
    (back, 0, 0, 0x80000000),  # kill: system calls of another architecture
    (load, 0, 0, 0),
    (at_least, 0, 1, 0x40000000),  # x32
    (back, 0, 0, refuse | _EPERM),
    (equal, 0, 1, _CLONE3[column]),  # its flags lie in memory; the C library falls back to clone
    (back, 0, 0, refuse | _ENOSYS),
  ]
  for numbers in _DENIED.values():
    if numbers[column] is not None:
      program += [(equal, 0, 1, numbers[column]), (back, 0, 0, refuse | _EPERM)]
  for numbers, argument, values in _DENIED_VALUES:
    program.append((equal, 0, 2 * len(values) + 2, numbers[column]))
    program.append((load, 0, 0, 16 + 8 * argument))
    for value in values:
      program += [(equal, 0, 1, value), (back, 0, 0, refuse | _EPERM)]
    program.append((back, 0, 0, allow))
  program += [
    (equal, 0, 4, _PRLIMIT[column]),
    (load, 0, 0, 16),
    (equal, 1, 0, 0),
    (back, 0, 0, refuse | _EPERM),
    (back, 0, 0, allow),
    (equal, 0, 3, _CLONE[column]),
    (load, 0, 0, 16),  # the flags
    (any_bit, 1, 0, _CLONE_THREAD),
    (back, 0, 0, refuse | _EPERM),
    (back, 0, 0, allow),
  ]
  code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
  pointer = struct.pack("H6xQ", len(program), ctypes.addressof(code))
  _check(_libc.prctl(_PR_SET_SECCOMP, 2, pointer, 0, 0), "prctl(PR_SET_SECCOMP)")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
  arguments = (text.encode() if text else None for text in (source, target, kind))
  _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()), f"mount at {target}")


def _set_mount(target: str, attributes: int, flags: int) -> None:
  arguments = struct.pack("QQQQ", attributes, 0, 0, 0)
  _syscall("mount_setattr", 442, -100, target.encode(), flags, arguments, len(arguments))


def _syscall(name: str, number: int, *arguments) -> int:
  arguments = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
  return _check(_libc.syscall(ctypes.c_long(number), *arguments), name)


def _check(result: int, what: str) -> int:
  if result < 0:
    error = ctypes.get_errno()
    raise OSError(error, f"{what}: {os.strerror(error)}")
  return result
