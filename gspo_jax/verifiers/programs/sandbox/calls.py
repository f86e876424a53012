"""List of the system calls allowed to a program on x86-64 and AArch64. All others are refused.

Since the list names the allowed calls, calls of future kernels are refused too. The list omits all
calls that affect other processes, the network, or files visible to other processes. For example,
such calls start processes, open sockets, send signals, or set priorities, locks or leases.

A seccomp filter applies the list. The filter is a program of the kernel's virtual machine (classic
BPF), which the kernel runs at each system call.
"""

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

# Numbers of allowed calls on x86-64 and AArch64, by name. None if the architecture has no such
# call.
ALLOWED = dict(
  read=(0, 63), write=(1, 64), readv=(19, 65), writev=(20, 66), pread64=(17, 67),
  pwrite64=(18, 68), preadv=(295, 69), pwritev=(296, 70), lseek=(8, 62), close=(3, 57),
  close_range=(436, 436), dup=(32, 23), dup2=(33, None), dup3=(292, 24), pipe=(22, None),
  pipe2=(293, 59), open=(2, None), openat=(257, 56), creat=(85, None), stat=(4, None),
  lstat=(6, None), fstat=(5, 80), newfstatat=(262, 79), statx=(332, 291), access=(21, None),
  faccessat=(269, 48), faccessat2=(439, 439), readlink=(89, None), readlinkat=(267, 78),
  getdents=(78, None), getdents64=(217, 61), getcwd=(79, 17), chdir=(80, 49), fchdir=(81, 50),
  statfs=(137, 43), fstatfs=(138, 44), sendfile=(40, 71), copy_file_range=(326, 285),
  mkdir=(83, None), mkdirat=(258, 34), rmdir=(84, None), unlink=(87, None), unlinkat=(263, 35),
  rename=(82, None), renameat=(264, 38), renameat2=(316, 276), link=(86, None), linkat=(265, 37),
  symlink=(88, None), symlinkat=(266, 36), truncate=(76, 45), ftruncate=(77, 46), fsync=(74, 82),
  fdatasync=(75, 83), chmod=(90, None), fchmod=(91, 52), fchmodat=(268, 53), umask=(95, 166),
  utime=(132, None), utimes=(235, None), utimensat=(280, 88), getxattr=(191, 8),
  lgetxattr=(192, 9), fgetxattr=(193, 10), listxattr=(194, 11), llistxattr=(195, 12),
  flistxattr=(196, 13), mmap=(9, 222), mprotect=(10, 226), munmap=(11, 215), mremap=(25, 216),
  brk=(12, 214), madvise=(28, 233), msync=(26, 227), rt_sigaction=(13, 134),
  rt_sigprocmask=(14, 135), rt_sigreturn=(15, 139), rt_sigpending=(127, 136),
  rt_sigtimedwait=(128, 137), rt_sigsuspend=(130, 133), sigaltstack=(131, 132),
  restart_syscall=(219, 128), alarm=(37, None), pause=(34, None), setitimer=(38, 103),
  getitimer=(36, 102), nanosleep=(35, 101), clock_nanosleep=(230, 115), clock_gettime=(228, 113),
  clock_getres=(229, 114), gettimeofday=(96, 169), time=(201, None), times=(100, 153),
  getrusage=(98, 165), sysinfo=(99, 179), uname=(63, 160), getcpu=(309, 168), getrandom=(318, 278),
  futex=(202, 98), set_robust_list=(273, 99), get_robust_list=(274, 100),
  set_tid_address=(218, 96), rseq=(334, 293), arch_prctl=(158, None), exit=(60, 93),
  exit_group=(231, 94), wait4=(61, 260), waitid=(247, 95), getpid=(39, 172), gettid=(186, 178),
  getppid=(110, 173), getuid=(102, 174), geteuid=(107, 175), getgid=(104, 176), getegid=(108, 177),
  getresuid=(118, 148), getresgid=(120, 150), getgroups=(115, 158), getpgrp=(111, None),
  getpgid=(121, 155), getsid=(124, 156), sched_yield=(24, 124), sched_getaffinity=(204, 123),
  sched_getparam=(143, 121), sched_getscheduler=(145, 120), getpriority=(140, 141),
  getrlimit=(97, 163), setrlimit=(160, 164), poll=(7, None), ppoll=(271, 73), select=(23, None),
  pselect6=(270, 72), epoll_create=(213, None), epoll_create1=(291, 20), epoll_ctl=(233, 21),
  epoll_wait=(232, None), epoll_pwait=(281, 22), eventfd=(284, None), eventfd2=(290, 19),
  recvfrom=(45, 207), getsockname=(51, 204), getsockopt=(55, 209),
)  # fmt: skip
# Calls allowed for some values of one argument: (numbers as above, index of the argument, values).
# Values are compared in 32 bits, as the kernel reads them.
ALLOWED_VALUES = dict(
  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Values for locks,
  # leases, notices and signals are refused.
  fcntl=((72, 25), 1, (0, 1, 2, 3, 4, 1030, 1032)),
  # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Values for flags of files are
  # refused.
  ioctl=((16, 29), 1, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
  prctl=((157, 167), 0, (15, 16)),  # PR_SET_NAME, PR_GET_NAME
  prlimit64=((302, 261), 0, (0,)),  # Limits of the process itself.
  socketpair=((53, 199), 0, (1,)),  # AF_UNIX, a pair of sockets for asyncio's event loop.
)
# Calls with separate rules in `program`. With `clone`, a program may start threads, but no
# processes. With `sendto`, it may send to a connected socket, but not to an address.
CLONE, CLONE3, SENDTO = (56, 220), (435, 435), (44, 206)

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x00010000  # Flag of `clone` for a thread.
_CLONE_NEW = 0x7E020080  # Flags of `clone` for new namespaces.
_X32 = 0x40000000  # Lowest number of a call in the x32 mode of x86-64, which is refused.
# Refused calls from this number on are reported as absent, so that the C library tries older ones.
_NEWEST = 424
_EPERM, _ENOSYS = 1, 38
_PR_SET_SECCOMP = 22

# Instructions of classic BPF: (code, instructions to skip if true, and if false, operand).
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_KILL = (_RETURN, 0, 0, 0x80000000)
_REFUSE = (_RETURN, 0, 0, 0x00050000 | _EPERM)
_ABSENT = (_RETURN, 0, 0, 0x00050000 | _ENOSYS)
_NUMBER = (_LOAD, 0, 0, 0)


def _argument(index: int, high: bool = False) -> tuple[int, int, int, int]:
  """Returns an instruction to load the low or high 32 bits of a call's argument."""
  return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def program(column: int, architecture: int) -> list[tuple[int, int, int, int]]:
  """Returns the filter's instructions for an architecture.

  Args:
    column: index of the architecture's number in each pair of the tables above.
    architecture: the kernel's number of the architecture.
  """
  lines = [
    (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), _KILL,
    _NUMBER, (_AT_LEAST, 0, 1, _X32), _REFUSE,
  ]  # fmt: skip
  for numbers in ALLOWED.values():
    if numbers[column] is not None:
      lines += [(_EQUAL, 0, 1, numbers[column]), _ALLOW]
  rules = [
    (numbers, [_argument(index), *(x for value in values for x in ((_EQUAL, 0, 1, value), _ALLOW))])
    for numbers, index, values in ALLOWED_VALUES.values()
  ]
  rules += [
    (CLONE, [_argument(0), (_ANY_BIT, 2, 0, _CLONE_NEW), (_ANY_BIT, 0, 1, _CLONE_THREAD), _ALLOW]),
    # A filter cannot read the flags of clone3, which are in memory. The C library then tries clone.
    (CLONE3, [_ABSENT]),
    (SENDTO, [_argument(4), (_EQUAL, 0, 3, 0), _argument(4, True), (_EQUAL, 0, 1, 0), _ALLOW]),
  ]
  for numbers, body in rules:
    body = [*body, _REFUSE]
    lines += [(_EQUAL, 0, len(body), numbers[column]), *body]
  return [*lines, (_AT_LEAST, 0, 1, _NEWEST), _ABSENT, _REFUSE]


def apply() -> None:
  """Confines this process and its children to the allowed calls, for good.

  Raises:
    OSError: the architecture is not supported, or the kernel has no seccomp filters.
  """
  machine = os.uname().machine
  if machine not in _ARCHITECTURES:
    raise OSError(f"there is no list of system calls for the architecture {machine!r}")
  lines = program(*_ARCHITECTURES[machine])
  code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
  pointer = struct.pack("H6xQ", len(lines), ctypes.addressof(code))
  if _libc.prctl(_PR_SET_SECCOMP, 2, pointer, 0, 0) < 0:
    error = ctypes.get_errno()
    raise OSError(error, f"prctl(PR_SET_SECCOMP): {os.strerror(error)}")
